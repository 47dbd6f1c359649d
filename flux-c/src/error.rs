//! What a function returns, and what it says of it.

use flux_ops::binding::{self, Class};
use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// What a function returns. After all but FLUX_OK, flux_last_error_message() of the same thread
/// says what happened and what to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum flux_status {
    /// Done, or, of a call on a CUDA stream, on its way.
    FLUX_OK = 0,
    /// An argument cannot be used: a null pointer, an unknown number, a structure of another size.
    FLUX_ERROR_ARGUMENT = 1,
    /// A handle is null, foreign, destroyed, of another process, or still in use.
    FLUX_ERROR_HANDLE = 2,
    /// An operand, extent or option does not fit. Nothing was launched; make a good call.
    FLUX_ERROR_OPERAND = 3,
    /// The ranks did not become a communicator.
    FLUX_ERROR_CONNECT = 4,
    /// The op, or the program of a call, could not be built. Of an op all ranks have left the
    /// build, and the communicator works.
    FLUX_ERROR_BUILD = 5,
    /// Ranks build different ops, after which the communicator works; or they make different calls,
    /// after which it is broken.
    FLUX_ERROR_DISAGREED = 6,
    /// A peer's process or thread is gone. The communicator is broken.
    FLUX_ERROR_PEER_LOST = 7,
    /// A peer has destroyed its communicator before this call. This rank's is broken.
    FLUX_ERROR_PEER_LEFT = 8,
    /// A peer did not come in time. The communicator is broken.
    FLUX_ERROR_TIMEOUT = 9,
    /// A peer has given the communicator up. It is broken.
    FLUX_ERROR_ABORTED = 10,
    /// The driver, NCCL or the operating system refused something.
    FLUX_ERROR_SYSTEM = 11,
    /// A defect of the library. Standard error has more; destroy the communicator.
    FLUX_ERROR_PANIC = 12,
}

/// Why a function does not return FLUX_OK.
#[derive(Debug)]
pub(crate) struct Error {
    status: flux_status,
    message: String,
    /// Those at fault.
    ranks: Vec<u32>,
}

impl Error {
    pub(crate) const fn new(status: flux_status, message: String) -> Self {
        Self { status, message, ranks: Vec::new() }
    }

    pub(crate) fn argument(message: impl Into<String>) -> Self {
        Self::new(flux_status::FLUX_ERROR_ARGUMENT, message.into())
    }

    pub(crate) fn handle(message: impl Into<String>) -> Self {
        Self::new(flux_status::FLUX_ERROR_HANDLE, message.into())
    }

    pub(crate) fn operand(message: impl Into<String>) -> Self {
        Self::new(flux_status::FLUX_ERROR_OPERAND, message.into())
    }
}

impl<E: Into<binding::Error>> From<E> for Error {
    fn from(error: E) -> Self {
        let binding::Error { class, message, ranks, .. } = error.into();
        let status = match class {
            Class::Operand => flux_status::FLUX_ERROR_OPERAND,
            Class::Connect => flux_status::FLUX_ERROR_CONNECT,
            Class::Build => flux_status::FLUX_ERROR_BUILD,
            Class::Disagreed => flux_status::FLUX_ERROR_DISAGREED,
            Class::PeerLost => flux_status::FLUX_ERROR_PEER_LOST,
            Class::PeerLeft => flux_status::FLUX_ERROR_PEER_LEFT,
            Class::Timeout => flux_status::FLUX_ERROR_TIMEOUT,
            Class::Aborted => flux_status::FLUX_ERROR_ABORTED,
            Class::Other => flux_status::FLUX_ERROR_SYSTEM,
        };
        Self { status, message, ranks: ranks.iter().map(|rank| rank.get()).collect() }
    }
}

/// The last error of a thread.
struct Last {
    message: CString,
    ranks: Vec<u32>,
}

thread_local! {
    static LAST: RefCell<Last> = RefCell::new(Last { message: CString::default(), ranks: Vec::new() });
}

/// Runs a function of the interface: no panic leaves it, and an error is kept for the thread.
pub(crate) fn guard(run: impl FnOnce() -> Result<(), Error>) -> flux_status {
    let error = match catch_unwind(AssertUnwindSafe(run)) {
        Ok(Ok(())) => return flux_status::FLUX_OK,
        Ok(Err(error)) => error,
        Err(panic) => Error::new(
            flux_status::FLUX_ERROR_PANIC,
            format!(
                "flux panicked, which is a defect of it: {}; destroy the communicator",
                words(&*panic)
            ),
        ),
    };
    let Error { status, message, ranks } = error;
    let message = CString::new(message.replace('\0', " ")).unwrap_or_default();
    // A thread that ends has none any more.
    let _kept = LAST.try_with(|last| *last.borrow_mut() = Last { message, ranks });
    status
}

/// What a panic says.
fn words(panic: &(dyn Any + Send)) -> &str {
    panic
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or("it says nothing")
}

/// What the last function of this thread that did not return FLUX_OK says: what happened, and what
/// to do. Empty before the first. UTF-8; it stays until the next such function of the thread, and
/// the caller does not free it.
#[unsafe(no_mangle)]
pub extern "C" fn flux_last_error_message() -> *const c_char {
    LAST.try_with(|last| last.borrow().message.as_ptr()).unwrap_or(c"".as_ptr())
}

/// The ranks at fault of the same error: the lost or late ones, or those that differ.
///
/// ranks     gets the first `capacity` of their numbers; NULL where that is 0
///
/// Returns how many there are; 0 where the error names none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flux_last_error_ranks(ranks: *mut u32, capacity: usize) -> usize {
    let copy = |last: &RefCell<Last>| {
        let known = &last.borrow().ranks;
        let written = known.len().min(capacity);
        if !ranks.is_null() {
            // SAFETY: the caller has room for `capacity` numbers, and nobody else has that memory.
            unsafe { std::ptr::copy_nonoverlapping(known.as_ptr(), ranks, written) };
        }
        known.len()
    };
    LAST.try_with(copy).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::CStr;

    fn message() -> String {
        // SAFETY: the message of this thread, which makes no call meanwhile.
        unsafe { CStr::from_ptr(flux_last_error_message()) }.to_str().unwrap().to_owned()
    }

    #[test]
    fn a_panic_is_an_error_with_its_words() {
        assert_eq!(guard(|| panic!("{} is odd", 3)), flux_status::FLUX_ERROR_PANIC);
        assert_eq!(
            message(),
            "flux panicked, which is a defect of it: 3 is odd; destroy the communicator"
        );
        assert_eq!(guard(|| std::panic::panic_any(5)), flux_status::FLUX_ERROR_PANIC);
        assert!(message().contains("it says nothing"));
    }

    #[test]
    fn an_error_is_its_threads_and_stays_after_success() {
        assert_eq!(message(), "");
        let lost = flux_transport::ControlError::PeerLost { rank: flux_transport::Rank::new(3) };
        assert_eq!(guard(|| Err((&lost).into())), flux_status::FLUX_ERROR_PEER_LOST);
        assert_eq!(guard(|| Ok(())), flux_status::FLUX_OK);
        assert!(message().starts_with("rank 3 is gone"));
        let mut ranks = [9; 2];
        // SAFETY: there is room for two.
        assert_eq!(unsafe { flux_last_error_ranks(ranks.as_mut_ptr(), 2) }, 1);
        assert_eq!(ranks, [3, 9]);
        // SAFETY: nothing is written.
        assert_eq!(unsafe { flux_last_error_ranks(std::ptr::null_mut(), 0) }, 1);
        std::thread::spawn(|| assert_eq!(message(), "")).join().unwrap();
    }

    #[test]
    fn a_message_with_a_nul_is_whole() {
        assert_eq!(guard(|| Err(Error::argument("a\0b"))), flux_status::FLUX_ERROR_ARGUMENT);
        assert_eq!(message(), "a b");
    }
}
