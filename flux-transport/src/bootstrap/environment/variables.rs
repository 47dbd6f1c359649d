//! Reading variables: what is wrong with one is said with its name and value.

use std::ffi::OsString;

use flux_core::WorldSize;
use flux_core::rank::MAX_WORLD;

use crate::bootstrap::error::BootstrapError;

#[derive(Clone, Copy)]
pub(super) struct Variables<'a> {
    pub(super) lookup: &'a dyn Fn(&str) -> Option<OsString>,
}

impl Variables<'_> {
    pub(super) fn get(&self, name: &str) -> Option<OsString> {
        (self.lookup)(name)
    }

    pub(super) fn value(&self, name: &str) -> OsString {
        self.get(name).unwrap_or_default()
    }

    pub(super) fn is_set(&self, name: &str) -> bool {
        self.get(name).is_some()
    }

    pub(super) fn any(&self, names: &[&'static str]) -> bool {
        names.iter().any(|name| self.is_set(name))
    }

    /// Half of a family is worse than none: it would be filled up with guesses.
    pub(super) fn all(&self, names: &[&'static str]) -> Result<(), BootstrapError> {
        let (set, missing): (Vec<_>, Vec<_>) =
            names.iter().copied().partition(|name| self.is_set(name));
        if missing.is_empty() { Ok(()) } else { Err(BootstrapError::HalfSet { set, missing }) }
    }

    pub(super) fn text(&self, name: &'static str) -> Result<String, BootstrapError> {
        let value = self.value(name);
        value
            .to_str()
            .map(str::to_owned)
            .filter(|text| !text.is_empty())
            .ok_or_else(|| self.wrong(name, "a text"))
    }

    /// A host's name or address; an IPv6 address may be in brackets.
    pub(super) fn host(&self, name: &'static str) -> Result<String, BootstrapError> {
        let text = self.text(name)?;
        let bare = text.strip_prefix('[').and_then(|text| text.strip_suffix(']'));
        Ok(bare.map_or_else(|| text.clone(), str::to_owned))
    }

    pub(super) fn number(&self, name: &'static str) -> Result<u32, BootstrapError> {
        let value = self.value(name);
        value
            .to_str()
            .and_then(|text| text.parse().ok())
            .ok_or_else(|| self.wrong(name, "a number"))
    }

    pub(super) fn world(&self, name: &'static str) -> Result<WorldSize, BootstrapError> {
        let remedy = "a tensor-parallel group inside a larger job is made with World::builder \
                      (docs/deployment.md), and FLUX_LAUNCHER=none lets a command of one process \
                      ignore the job";
        WorldSize::new(self.number(name)?).ok_or_else(|| {
            self.wrong(name, &format!("a world size from 1 to {MAX_WORLD}: {remedy}"))
        })
    }

    pub(super) fn below(
        &self,
        name: &'static str,
        limit: u32,
        of: &str,
    ) -> Result<u32, BootstrapError> {
        let value = self.number(name)?;
        if value < limit {
            Ok(value)
        } else {
            Err(self.wrong(name, &format!("below {of} = {limit}")))
        }
    }

    /// A number of ranks on this host, which is no more than that of all.
    pub(super) fn part_of(
        &self,
        name: &'static str,
        world: WorldSize,
        of: &str,
    ) -> Result<u32, BootstrapError> {
        let value = self.number(name)?;
        if value <= world.get() {
            Ok(value)
        } else {
            Err(self.wrong(name, &format!("at most {of} = {}", world.get())))
        }
    }

    pub(super) fn wrong(&self, variable: &'static str, wanted: &str) -> BootstrapError {
        let value = self.value(variable).to_string_lossy().into_owned();
        BootstrapError::Variable { variable, value, wanted: wanted.to_owned() }
    }
}
