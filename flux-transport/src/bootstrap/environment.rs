//! Who this process is, as its launcher says in environment variables.
//!
//! Invariant: a family of variables is taken whole or refused; flux's own comes first, then torchrun's. `MASTER_PORT` is never bound
//! (torchrun's own store may sit there): it only tells launches of one user apart.

use std::ffi::OsString;
use std::path::PathBuf;

use flux_core::{Rank, WorldSize};

use super::error::BootstrapError;

/// The rank, in flux's own family.
pub const FLUX_RANK: &str = "FLUX_RANK";
/// The number of ranks, in flux's own family.
pub const FLUX_WORLD_SIZE: &str = "FLUX_WORLD_SIZE";
/// The rank among those of this host, in flux's own family.
pub const FLUX_LOCAL_RANK: &str = "FLUX_LOCAL_RANK";
/// A private directory (mode 0700, of this user) where the ranks meet, in flux's own family.
pub const FLUX_RENDEZVOUS: &str = "FLUX_RENDEZVOUS";

const OWN: [&str; 4] = [FLUX_RANK, FLUX_WORLD_SIZE, FLUX_LOCAL_RANK, FLUX_RENDEZVOUS];
/// Any of these says that torchrun, or something like it, started us; `MASTER_*` alone are often part of a container's environment.
const TORCHRUN_MARKS: [&str; 4] = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"];
const TORCHRUN: [&str; 6] = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"];

/// One process's place in a launch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Environment {
    /// This process's rank.
    pub rank: Rank,
    /// The number of ranks.
    pub world: WorldSize,
    /// The rank among those of this host: the device to take where nothing else is said.
    pub local_rank: u32,
    /// Where the ranks meet.
    pub place: Place,
}

/// Where the ranks of one launch meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The directory of the rendezvous socket; mode 0700 and of this user, or it is refused.
    pub directory: PathBuf,
    /// Whether rank 0 makes the directory and removes it afterwards; else the launcher does.
    pub made_by_rank_zero: bool,
    /// Tells this launch from others that might use the directory by mistake. Not a secret: the directory's mode keeps others out.
    pub nonce: u128,
}

impl Environment {
    /// Reads this process's environment.
    ///
    /// # Errors
    /// [`BootstrapError::NoLauncher`] where no family is there; [`BootstrapError::HalfSet`], [`BootstrapError::Variable`] and
    /// [`BootstrapError::SeveralHosts`] where one is there and is wrong.
    pub fn read() -> Result<Self, BootstrapError> {
        Self::parse(&|name| std::env::var_os(name))
    }

    /// As [`read`](Self::read), of any set of variables.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn parse(lookup: &dyn Fn(&str) -> Option<OsString>) -> Result<Self, BootstrapError> {
        let vars = Variables { lookup };
        if vars.any(&OWN) {
            vars.all(&OWN)?;
            return Self::own(&vars);
        }
        if vars.any(&TORCHRUN_MARKS) {
            vars.all(&TORCHRUN)?;
            return Self::torchrun(&vars);
        }
        Err(BootstrapError::NoLauncher)
    }

    fn own(vars: &Variables<'_>) -> Result<Self, BootstrapError> {
        let world = vars.world(FLUX_WORLD_SIZE)?;
        let rank = vars.below(FLUX_RANK, world.get(), FLUX_WORLD_SIZE)?;
        let local_rank = vars.below(FLUX_LOCAL_RANK, world.get(), FLUX_WORLD_SIZE)?;
        let directory = PathBuf::from((vars.lookup)(FLUX_RENDEZVOUS).unwrap_or_default());
        if !directory.is_absolute() {
            return Err(vars.wrong(FLUX_RENDEZVOUS, "an absolute path"));
        }
        let nonce = digest(&[directory.as_os_str().as_encoded_bytes()]);
        Ok(Self { rank: Rank::new(rank), world, local_rank, place: Place { directory, made_by_rank_zero: false, nonce } })
    }

    fn torchrun(vars: &Variables<'_>) -> Result<Self, BootstrapError> {
        let world = vars.number("WORLD_SIZE")?;
        let local = vars.number("LOCAL_WORLD_SIZE")?;
        let local_rank = vars.below("LOCAL_RANK", local, "LOCAL_WORLD_SIZE")?;
        if local > world {
            return Err(vars.wrong("LOCAL_WORLD_SIZE", &format!("at most WORLD_SIZE = {world}")));
        }
        let rank = vars.below("RANK", world, "WORLD_SIZE")?;
        if local != world {
            return Err(BootstrapError::SeveralHosts { local, world });
        }
        let world = vars.world("WORLD_SIZE")?;
        let uid = rustix::process::getuid().as_raw();
        // The restart count keeps a restarted group of the same run from meeting what is left of the one before.
        let names = ["MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"];
        let values = names.map(|name| (vars.lookup)(name).unwrap_or_default());
        let nonce = digest(&values.each_ref().map(|value| value.as_encoded_bytes()));
        let directory = runtime_directory(vars.lookup).join(format!("flux-{uid}-{nonce:032x}"));
        Ok(Self { rank: Rank::new(rank), world, local_rank, place: Place { directory, made_by_rank_zero: true, nonce } })
    }
}

/// Where private run-time directories are made: `XDG_RUNTIME_DIR` where it is a directory, else the directory of temporary files.
pub(crate) fn runtime_directory(lookup: &dyn Fn(&str) -> Option<OsString>) -> PathBuf {
    lookup("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|path| path.is_absolute() && path.is_dir()).unwrap_or_else(std::env::temp_dir)
}

struct Variables<'a> {
    lookup: &'a dyn Fn(&str) -> Option<OsString>,
}

impl Variables<'_> {
    fn any(&self, names: &[&'static str]) -> bool {
        names.iter().any(|name| (self.lookup)(name).is_some())
    }

    fn all(&self, names: &[&'static str]) -> Result<(), BootstrapError> {
        let (set, missing): (Vec<_>, Vec<_>) = names.iter().copied().partition(|name| (self.lookup)(name).is_some());
        if missing.is_empty() { Ok(()) } else { Err(BootstrapError::HalfSet { set, missing }) }
    }

    fn number(&self, name: &'static str) -> Result<u32, BootstrapError> {
        let value = (self.lookup)(name).unwrap_or_default();
        value.to_str().and_then(|text| text.parse().ok()).ok_or_else(|| self.wrong(name, "a number"))
    }

    fn world(&self, name: &'static str) -> Result<WorldSize, BootstrapError> {
        WorldSize::new(self.number(name)?)
            .ok_or_else(|| self.wrong(name, &format!("a world size from 1 to {}", flux_core::rank::MAX_WORLD)))
    }

    fn below(&self, name: &'static str, limit: u32, of: &str) -> Result<u32, BootstrapError> {
        let value = self.number(name)?;
        if value < limit { Ok(value) } else { Err(self.wrong(name, &format!("below {of} = {limit}"))) }
    }

    fn wrong(&self, variable: &'static str, wanted: &str) -> BootstrapError {
        let value = (self.lookup)(variable).unwrap_or_default().to_string_lossy().into_owned();
        BootstrapError::Variable { variable, value, wanted: wanted.to_owned() }
    }
}

/// FNV-1a of the parts and their lengths: a name for a launch, not a defence (the directory's mode is).
fn digest(parts: &[&[u8]]) -> u128 {
    const OFFSET: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
    let lengths = parts.iter().flat_map(|part| (part.len() as u64).to_le_bytes());
    let bytes = parts.iter().flat_map(|part| part.iter().copied());
    lengths.chain(bytes).fold(OFFSET, |hash, byte| (hash ^ u128::from(byte)).wrapping_mul(PRIME))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(vars: &[(&str, &str)]) -> Result<Environment, BootstrapError> {
        Environment::parse(&|name| vars.iter().find(|(key, _)| *key == name).map(|(_, value)| OsString::from(value)))
    }

    const OWN_SET: [(&str, &str); 4] =
        [("FLUX_RANK", "1"), ("FLUX_WORLD_SIZE", "4"), ("FLUX_LOCAL_RANK", "1"), ("FLUX_RENDEZVOUS", "/run/x")];
    const TORCH_SET: [(&str, &str); 6] = [
        ("RANK", "3"),
        ("WORLD_SIZE", "8"),
        ("LOCAL_RANK", "3"),
        ("LOCAL_WORLD_SIZE", "8"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", "29500"),
    ];

    fn with(set: &[(&'static str, &'static str)], name: &str, value: &'static str) -> Vec<(&'static str, &'static str)> {
        set.iter().map(|&(key, old)| (key, if key == name { value } else { old })).collect()
    }

    #[test]
    fn own_family_comes_before_torchruns() {
        let both: Vec<_> = OWN_SET.iter().chain(&TORCH_SET).copied().collect();
        let env = parse(&both).unwrap();
        assert_eq!((env.rank, env.world.get(), env.local_rank), (Rank::new(1), 4, 1));
        assert_eq!(env.place.directory, PathBuf::from("/run/x"));
        assert!(!env.place.made_by_rank_zero);
    }

    #[test]
    fn torchrun_names_a_directory_of_user_and_run() {
        let env = parse(&TORCH_SET).unwrap();
        assert_eq!((env.rank, env.world.get(), env.local_rank), (Rank::new(3), 8, 3));
        assert!(env.place.made_by_rank_zero);
        let uid = rustix::process::getuid().as_raw();
        assert!(env.place.directory.file_name().unwrap().to_str().unwrap().starts_with(&format!("flux-{uid}-")));
        let other_port = parse(&with(&TORCH_SET, "MASTER_PORT", "29501")).unwrap();
        assert_ne!(env.place.directory, other_port.place.directory);
        let other_run: Vec<_> = TORCH_SET.iter().copied().chain([("TORCHELASTIC_RUN_ID", "b")]).collect();
        assert_ne!(env.place.nonce, parse(&other_run).unwrap().place.nonce);
        let same_run_other_rank = parse(&with(&with(&TORCH_SET, "RANK", "4"), "LOCAL_RANK", "4")).unwrap();
        assert_eq!(env.place, same_run_other_rank.place);
    }

    #[test]
    fn no_variable_is_no_launcher() {
        assert!(matches!(parse(&[]), Err(BootstrapError::NoLauncher)));
        assert!(matches!(parse(&[("MASTER_ADDR", "a"), ("MASTER_PORT", "1")]), Err(BootstrapError::NoLauncher)));
    }

    #[test]
    fn each_missing_variable_of_a_family_is_named() {
        for set in [&OWN_SET[..], &TORCH_SET[..]] {
            for left_out in 0..set.len() {
                let vars: Vec<_> = set.iter().enumerate().filter(|(i, _)| *i != left_out).map(|(_, var)| *var).collect();
                let Err(BootstrapError::HalfSet { missing, set: there }) = parse(&vars) else { panic!("{vars:?}") };
                assert_eq!(missing, [set[left_out].0]);
                assert_eq!(there.len(), set.len() - 1);
            }
        }
    }

    #[test]
    fn contradictions_name_the_variable() {
        let wrong = |vars: Vec<(&str, &str)>, name: &str| {
            let error = parse(&vars).unwrap_err();
            assert!(matches!(&error, BootstrapError::Variable { variable, .. } if *variable == name), "{error}");
            assert!(error.to_string().contains(name));
        };
        wrong(with(&OWN_SET, "FLUX_RANK", "4"), "FLUX_RANK");
        wrong(with(&OWN_SET, "FLUX_RANK", "-1"), "FLUX_RANK");
        wrong(with(&OWN_SET, "FLUX_RANK", ""), "FLUX_RANK");
        wrong(with(&OWN_SET, "FLUX_LOCAL_RANK", "9"), "FLUX_LOCAL_RANK");
        wrong(with(&OWN_SET, "FLUX_WORLD_SIZE", "0"), "FLUX_WORLD_SIZE");
        wrong(with(&OWN_SET, "FLUX_WORLD_SIZE", "17"), "FLUX_WORLD_SIZE");
        wrong(with(&OWN_SET, "FLUX_RENDEZVOUS", "relative"), "FLUX_RENDEZVOUS");
        wrong(with(&TORCH_SET, "RANK", "8"), "RANK");
        wrong(with(&TORCH_SET, "LOCAL_RANK", "8"), "LOCAL_RANK");
        wrong(with(&TORCH_SET, "LOCAL_WORLD_SIZE", "9"), "LOCAL_WORLD_SIZE");
        wrong(with(&TORCH_SET, "WORLD_SIZE", "eight"), "WORLD_SIZE");
    }

    #[test]
    fn several_hosts_are_refused() {
        let error = parse(&with(&TORCH_SET, "LOCAL_WORLD_SIZE", "4")).unwrap_err();
        assert!(matches!(error, BootstrapError::SeveralHosts { local: 4, world: 8 }));
        assert!(error.to_string().contains("several hosts are not supported yet"));
    }
}
