//! Random bytes of the system.

use rustix::io::Errno;

pub(crate) fn random<const N: usize>() -> Result<[u8; N], Errno> {
    let mut bytes = [0; N];
    let mut have = 0;
    while have < N {
        have += rustix::rand::getrandom(&mut bytes[have..], rustix::rand::GetRandomFlags::empty())?;
    }
    Ok(bytes)
}
