//! Every algorithm that cuBLASLt has for a GEMM, whatever its heuristic says of them.
//!
//! Invariant: the library itself has checked each for the shape.

use super::gemm::{Gemm, Types};
use super::library::{Algo, Candidate, CublasError, check};
use std::ffi::c_int;

/// Algorithms that the library is asked for; it has some dozens.
const MOST_IDS: c_int = 256;
/// Tiles and stages of an algorithm; the enumerations have some hundreds.
const MOST_VALUES: usize = 1024;
/// Values of an algorithm's own option that are tried.
const MOST_OPTIONS: u32 = 8;

/// `cublasLtMatmulAlgoCapAttributes_t`.
mod capability {
    pub(super) const CTA_SWIZZLING: i32 = 2;
    pub(super) const TILE_IDS: i32 = 6;
    pub(super) const CUSTOM_OPTION_MAX: i32 = 7;
    pub(super) const STAGES_IDS: i32 = 13;
}

/// `cublasLtMatmulAlgoConfigAttributes_t`.
mod config {
    pub(super) const TILE_ID: i32 = 1;
    pub(super) const CTA_SWIZZLING: i32 = 4;
    pub(super) const CUSTOM_OPTION: i32 = 5;
    pub(super) const STAGES_ID: i32 = 6;
}

/// What an algorithm can be set to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Capabilities {
    tiles: Vec<u32>,
    stages: Vec<u32>,
    most_swizzling: u32,
    most_option: u32,
}

impl Capabilities {
    /// Every setting: an attribute and its value each. Where a list is empty the attribute keeps
    /// its default.
    fn settings(&self) -> Vec<Vec<(c_int, u32)>> {
        let choices = [
            (config::TILE_ID, self.tiles.clone()),
            (config::STAGES_ID, self.stages.clone()),
            (config::CTA_SWIZZLING, (0..=self.most_swizzling).collect()),
            (config::CUSTOM_OPTION, (0..=self.most_option.min(MOST_OPTIONS - 1)).collect()),
        ];
        choices.into_iter().filter(|(_, values)| !values.is_empty()).fold(
            vec![Vec::new()],
            |settings, (attribute, values)| {
                let with = |setting: &Vec<_>, value| {
                    setting.iter().copied().chain([(attribute, value)]).collect()
                };
                settings
                    .iter()
                    .flat_map(|setting| values.iter().map(move |&value| with(setting, value)))
                    .collect()
            },
        )
    }
}

impl Gemm {
    /// Every algorithm in every configuration that the library accepts, without split-K.
    pub(super) fn configurations(&self) -> Result<Vec<Candidate>, CublasError> {
        let (lt, handle) = (self.library, self.handle);
        let Types { operand: x, output: y, compute, scale } = self.types;
        let mut ids: [c_int; MOST_IDS as usize] = [0; MOST_IDS as usize];
        let (into, mut found) = (ids.as_mut_ptr(), 0);
        // SAFETY: the handle exists; there is room for `MOST_IDS` results.
        check("cublasLtMatmulAlgoGetIds", unsafe {
            (lt.algo_ids)(handle, compute, scale, x, x, y, y, MOST_IDS, into, &raw mut found)
        })?;
        let mut accepted = Vec::new();
        for &id in ids.iter().take(found.unsigned_abs() as usize) {
            let mut algo: Algo = [0; 8];
            // SAFETY: the handle exists; a place for the result.
            let made =
                unsafe { (lt.algo_init)(handle, compute, scale, x, x, y, y, id, &raw mut algo) };
            // Some ids are of other types or devices.
            if made != 0 {
                continue;
            }
            let settings = self.capabilities(&algo).settings();
            accepted.extend(settings.iter().filter_map(|setting| self.configured(algo, setting)));
        }
        Ok(accepted)
    }

    fn capabilities(&self, algo: &Algo) -> Capabilities {
        let number = |attribute| self.capability(algo, attribute, 1).first().copied().unwrap_or(0);
        Capabilities {
            tiles: self.capability(algo, capability::TILE_IDS, MOST_VALUES),
            stages: self.capability(algo, capability::STAGES_IDS, MOST_VALUES),
            most_swizzling: number(capability::CTA_SWIZZLING).min(1),
            most_option: number(capability::CUSTOM_OPTION_MAX),
        }
    }

    /// Values of an attribute, none where the algorithm has no such attribute.
    fn capability(&self, algo: &Algo, attribute: c_int, most: usize) -> Vec<u32> {
        let mut values = vec![0u32; most];
        let (into, bytes) = (values.as_mut_ptr().cast(), most * size_of::<u32>());
        let mut written = 0;
        // SAFETY: the algorithm was initialised; there is room for `most` values of 32 bits.
        let status = unsafe {
            (self.library.algo_capability)(algo, attribute, into, bytes, &raw mut written)
        };
        values.truncate(if status == 0 { written / size_of::<u32>() } else { 0 });
        values
    }

    /// The algorithm with this setting, if the library runs it on the shape.
    fn configured(&self, mut algo: Algo, setting: &[(c_int, u32)]) -> Option<Candidate> {
        let Self { library: lt, handle, desc, .. } = *self;
        for &(attribute, ref value) in setting {
            let from = std::ptr::from_ref(value).cast();
            // SAFETY: the algorithm was initialised; the attribute has 32 bits.
            let set =
                unsafe { (lt.algo_configure)(&raw mut algo, attribute, from, size_of::<u32>()) };
            if set != 0 {
                return None;
            }
        }
        let mut candidate = Candidate::default();
        let (w, x, y) = (self.w_layout, self.x_layout, self.y_layout);
        // SAFETY: all descriptors exist; a place for the result.
        let checked = unsafe {
            (lt.algo_check)(handle, desc, w, x, y, y, &raw const algo, &raw mut candidate)
        };
        (checked == 0).then_some(Candidate { algo, ..candidate })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_all_combinations_of_what_an_algorithm_can_be_set_to() {
        let some = Capabilities {
            tiles: vec![20, 24],
            stages: vec![],
            most_swizzling: 1,
            most_option: 100,
        };
        let settings = some.settings();
        assert_eq!(settings.len(), 2 * 2 * MOST_OPTIONS as usize);
        assert_eq!(
            settings[0],
            [(config::TILE_ID, 20), (config::CTA_SWIZZLING, 0), (config::CUSTOM_OPTION, 0)]
        );
        let distinct: std::collections::BTreeSet<_> = settings.iter().collect();
        assert_eq!(distinct.len(), settings.len());
        assert_eq!(
            Capabilities::default().settings(),
            [[(config::CTA_SWIZZLING, 0), (config::CUSTOM_OPTION, 0)]]
        );
    }
}
