//! Handles, and what functions share in reading arguments.
//!
//! Invariant: a handle is an odd number, so no object's address is one, and it is never read.

use crate::error::Error;
use flux_ops::binding::{Handles, OfProcess};
use std::ffi::{CStr, c_char};
use std::sync::Arc;

/// A kind of handle.
pub(crate) struct Kind<T: 'static> {
    /// As errors name it.
    pub(crate) name: &'static str,
    /// The last four bits of its handles.
    pub(crate) tag: u64,
    pub(crate) values: Handles<T>,
}

impl<T> Kind<T> {
    /// Keeps a value, and returns its handle.
    pub(crate) fn keep<H>(&self, value: T) -> *mut H {
        let number = Handles::<T>::number() << 4 | self.tag;
        self.values.keep(number, value);
        std::ptr::without_provenance_mut(number as usize)
    }

    /// The value of a handle.
    pub(crate) fn get<H>(&self, handle: *const H) -> Result<Arc<OfProcess<T>>, Error> {
        self.values.get(handle.addr() as u64).ok_or_else(|| self.unknown(handle))
    }

    /// Takes the value of a handle out.
    pub(crate) fn remove<H>(&self, handle: *const H) -> Result<Arc<OfProcess<T>>, Error> {
        self.values.remove(handle.addr() as u64).ok_or_else(|| self.unknown(handle))
    }

    fn unknown<H>(&self, handle: *const H) -> Error {
        let Self { name, tag, .. } = self;
        Error::handle(match handle.addr() as u64 {
            0 => format!("the {name} is NULL: give the handle that its creation has returned"),
            number if number & 0xf == *tag => {
                format!("the {name} {handle:p} has been destroyed: create another one")
            }
            _ => format!("{handle:p} is no {name}: give the handle that its creation has returned"),
        })
    }
}

/// The value, if this process has made it.
pub(crate) fn here<T>(value: &OfProcess<T>) -> Result<&T, Error> {
    value.get().map_err(|process| {
        let this = std::process::id();
        Error::handle(format!(
            "the handle belongs to process {process}, and this is process {this}, forked from it: \
             create communicators after the fork"
        ))
    })
}

/// Checks a pointer that must be given.
pub(crate) fn given<T>(name: &str, pointer: *const T) -> Result<(), Error> {
    if pointer.is_null() {
        Err(Error::argument(format!("{name} is NULL: give it")))
    } else {
        Ok(())
    }
}

/// A structure that begins with its size.
///
/// # Safety
/// Every bit pattern is a value.
pub(crate) unsafe trait Structure: Copy {
    const NAME: &'static str;
}

/// Reads a structure of the caller's.
///
/// # Safety
/// `from` is NULL, or the address of as many bytes as the structure's size says.
pub(crate) unsafe fn structure<T: Structure>(from: *const T) -> Result<T, Error> {
    given(T::NAME, from)?;
    // SAFETY: as the caller vouches; it begins with its size. C code may not have aligned it.
    let size = unsafe { from.cast::<usize>().read_unaligned() };
    if size != size_of::<T>() {
        let (name, known) = (T::NAME, size_of::<T>());
        return Err(Error::argument(format!(
            "{name}.size = {size}, and this library has {known}: set it to sizeof, and use the \
             library's own flux.h"
        )));
    }
    // SAFETY: as the caller vouches, and every bit pattern is a value.
    Ok(unsafe { from.read_unaligned() })
}

/// Reads text of the caller's.
///
/// # Safety
/// `from` is NULL or ends with a NUL.
pub(crate) unsafe fn text<'t>(name: &str, from: *const c_char) -> Result<&'t str, Error> {
    given(name, from)?;
    // SAFETY: as the caller vouches.
    let text = unsafe { CStr::from_ptr(from) };
    text.to_str().map_err(|error| Error::argument(format!("{name} is no UTF-8: {error}")))
}

/// Copies text to the caller, cut where there is no room for all of it.
///
/// # Safety
/// `to` has room for `capacity` bytes, or that is 0; `needed` is NULL or writable.
pub(crate) unsafe fn copy_text(
    text: &str,
    to: *mut c_char,
    capacity: usize,
    needed: *mut usize,
) -> Result<(), Error> {
    if capacity > 0 {
        given("text", to)?;
    }
    // SAFETY: as the caller vouches.
    unsafe { write(needed, text.len() + 1) };
    let Some(room) = capacity.checked_sub(1) else { return Ok(()) };
    // Between two characters.
    let kept = text.floor_char_boundary(room);
    // SAFETY: at most `capacity - 1` bytes and a NUL.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr().cast(), to, kept);
        to.add(kept).write(0);
    }
    Ok(())
}

/// Writes a result that the caller may not want.
///
/// # Safety
/// `to` is NULL or writable.
pub(crate) unsafe fn write<T>(to: *mut T, value: T) {
    if !to.is_null() {
        // SAFETY: as the caller vouches.
        unsafe { to.write(value) };
    }
}
