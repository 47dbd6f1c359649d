//! The log of `ptxas -v`, as NVRTC passes it on.
//!
//! ```text
//! ptxas info    : (C7511) Potential Performance Loss: wgmma.mma_async instructions are serialized
//!                 due to ... in the function 'f'
//! ptxas info    : Compiling entry function 'f' for 'sm_90a'
//! ptxas info    : Function properties for f
//! ptxas         .     952 bytes stack frame, 1288 bytes spill stores, 1464 bytes spill loads
//! ptxas info    : Used 32 registers, used 1 barriers, 952 bytes cumulative stack size, ...
//! ```

/// What the log says of a function and its image does not; bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Said {
    pub(super) spill_stores: u32,
    pub(super) spill_loads: u32,
    pub(super) shared: u32,
}

/// What it says of this function; `None` where it says nothing.
pub(super) fn function(log: &str, name: &str) -> Option<Said> {
    let mut lines = log.lines().skip_while(|line| {
        line.split_once("Function properties for ").is_none_or(|(_, of)| of.trim() != name)
    });
    lines.next()?;
    let properties = lines.next()?;
    // A device function has no such line: it takes its caller's registers and shared memory.
    let shared = lines
        .next()
        .filter(|line| line.contains(": Used "))
        .and_then(|used| before(used, " bytes smem"))
        .unwrap_or(0);
    Some(Said {
        spill_stores: before(properties, " bytes spill stores")?,
        spill_loads: before(properties, " bytes spill loads")?,
        shared,
    })
}

/// Whether it says that the function's `wgmma` instructions wait for one another.
pub(super) fn serialized(log: &str, name: &str) -> bool {
    let quoted = format!("'{name}'");
    log.lines()
        .any(|line| line.contains("wgmma") && line.contains("serialized") && line.contains(&quoted))
}

/// Lines that warn, of the front end or of ptxas.
pub(super) fn warnings(log: &str) -> Vec<String> {
    let warns =
        |line: &&str| line.contains("warning") || line.contains("Potential Performance Loss");
    log.lines().filter(warns).map(|line| line.trim().to_owned()).collect()
}

/// The number before `unit`.
fn before(line: &str, unit: &str) -> Option<u32> {
    line.split_once(unit)?.0.rsplit(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As NVRTC 13.0 writes it.
    const LOG: &str = "\
ptxas info    : (C7519) warpgroup.arrive is injected in around line 61 by compiler to allow use of registers in GMMA in function 'w'
ptxas info    : (C7511) Potential Performance Loss: wgmma.mma_async instructions are serialized due to insufficient register resources for the wgmma pipeline in the function 'w'
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'w' for 'sm_90a'
ptxas info    : Function properties for w
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 30 registers, used 0 barriers
ptxas info    : Compile time = 8.357 ms
ptxas info    : Compiling entry function 'ww' for 'sm_90a'
ptxas info    : Function properties for ww
ptxas         .     952 bytes stack frame, 1288 bytes spill stores, 1464 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 952 bytes cumulative stack size, 256 bytes smem
";

    #[test]
    fn each_function_has_its_own_numbers() {
        assert_eq!(function(LOG, "w"), Some(Said { spill_stores: 0, spill_loads: 0, shared: 0 }));
        assert_eq!(
            function(LOG, "ww"),
            Some(Said { spill_stores: 1288, spill_loads: 1464, shared: 256 })
        );
        assert_eq!(function(LOG, "www"), None);
        assert_eq!(function("", "w"), None);
    }

    #[test]
    fn the_older_layout_of_the_properties_is_read_too() {
        let log = LOG.replace("ptxas         .     ", "    ");
        assert_eq!(function(&log, "ww"), function(LOG, "ww"));
    }

    #[test]
    fn serialized_instructions_are_laid_to_their_function() {
        assert!(serialized(LOG, "w"));
        assert!(!serialized(LOG, "ww"));
        assert_eq!(warnings(LOG).len(), 1);
    }
}
