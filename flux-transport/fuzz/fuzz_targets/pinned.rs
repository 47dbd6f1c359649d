#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    flux_transport::fuzz::pinned(bytes);
});
