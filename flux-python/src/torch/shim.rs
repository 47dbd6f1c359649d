//! torch's stable C interface (`torch/csrc/stable/c/shim.h`), taken from the libraries that the
//! process has loaded.
//!
//! Invariant: what is looked up here is in every torch from 2.10 on, with these signatures. Nothing
//! of torch is linked, or needed to build.

use crate::error::Error;
use flux_ops::binding::Class;
use libloading::os::unix::{Library, RTLD_LAZY};
use std::ffi::{CStr, c_char, c_void};
use std::sync::OnceLock;

/// `RTLD_NOLOAD`: finds a library that is loaded, and loads none.
const RTLD_NOLOAD: i32 = 4;
/// The version whose conventions the kernels follow, as torch's headers write it: 2.10.0.
const BUILD_VERSION: u64 = (2 << 56) | (10 << 48);

/// A tensor of torch: owned where it is an argument of a kernel, until it is deleted.
pub(super) type TensorHandle = *mut c_void;
pub(super) type LibraryHandle = *mut c_void;
/// A list of arguments, which the kernel owns.
type ListHandle = *mut c_void;
/// What the dispatcher hands to a kernel: arguments in their order, replaced by results.
pub(super) type Boxed = extern "C-unwind" fn(*mut u64, u64, u64);
type Code = i32;

macro_rules! shim {
    ($($(#[$attribute:meta])* $field:ident: $symbol:literal, fn($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// The functions; `cuda_stream` is in torch builds with CUDA alone.
        pub(super) struct Shim {
            $($(#[$attribute])* $field: unsafe extern "C-unwind" fn($($argument),*) $(-> $result)?,)*
            cuda_stream: Option<unsafe extern "C-unwind" fn(i32, *mut *mut c_void) -> Code>,
            pub(super) types: Types,
            // After what points into them. Never closed: torch's dispatcher keeps the kernels.
            _libraries: (Library, Option<Library>),
        }

        impl Shim {
            fn load(cpu: &str, cuda: Option<&str>) -> Result<Self, Error> {
                let cpu = open(cpu)?;
                let cuda = cuda.map(open).transpose()?;
                // SAFETY: torch declares these functions with these signatures.
                unsafe {
                    $(let $field = *cpu.get($symbol.to_bytes_with_nul()).map_err(|error| too_old($symbol, &error))?;)*
                    let types = Types::ask(&cpu)?;
                    let cuda_stream = cuda.as_ref().and_then(|cuda| {
                        cuda.get(b"aoti_torch_get_current_cuda_stream\0").ok().map(|symbol| *symbol)
                    });
                    Ok(Self { $($field,)* cuda_stream, types, _libraries: (cpu, cuda) })
                }
            }
        }
    };
}

shim! {
    library_fragment: c"aoti_torch_library_init_fragment", fn(*const c_char, *const c_char, u32, *mut LibraryHandle) -> Code;
    library_of_key: c"aoti_torch_library_init_impl", fn(*const c_char, *const c_char, *const c_char, u32, *mut LibraryHandle) -> Code;
    library_def: c"aoti_torch_library_def", fn(LibraryHandle, *const c_char) -> Code;
    library_impl: c"torch_library_impl", fn(LibraryHandle, *const c_char, Boxed, u64) -> Code;
    delete_tensor: c"aoti_torch_delete_tensor_object", fn(TensorHandle) -> Code;
    data_ptr: c"aoti_torch_get_data_ptr", fn(TensorHandle, *mut *mut c_void) -> Code;
    dim: c"aoti_torch_get_dim", fn(TensorHandle, *mut i64) -> Code;
    sizes: c"aoti_torch_get_sizes", fn(TensorHandle, *mut *mut i64) -> Code;
    strides: c"aoti_torch_get_strides", fn(TensorHandle, *mut *mut i64) -> Code;
    dtype: c"aoti_torch_get_dtype", fn(TensorHandle, *mut i32) -> Code;
    device_type: c"aoti_torch_get_device_type", fn(TensorHandle, *mut i32) -> Code;
    device_index: c"aoti_torch_get_device_index", fn(TensorHandle, *mut i32) -> Code;
    list_size: c"torch_list_size", fn(ListHandle, *mut usize) -> Code;
    list_item: c"torch_list_get_item", fn(ListHandle, usize, *mut u64) -> Code;
    delete_list: c"torch_delete_list", fn(ListHandle) -> Code;
    /// Throws a C++ exception, which becomes a RuntimeError.
    check: c"aoti_torch_check", fn(bool, *const c_char, *const c_char, u32, *const c_char);
    /// C++'s `operator delete`: the dispatcher makes an optional argument with `new`.
    operator_delete: c"_ZdlPv", fn(*mut c_void);
}

/// torch's numbers of what operands can be.
#[derive(Clone, Copy, Debug)]
pub(super) struct Types {
    pub(super) bf16: i32,
    pub(super) f16: i32,
    pub(super) f32: i32,
    pub(super) e4m3: i32,
    pub(super) cpu: i32,
    pub(super) cuda: i32,
}

impl Types {
    /// # Safety
    /// `library` is torch's.
    unsafe fn ask(library: &Library) -> Result<Self, Error> {
        let number = |symbol: &CStr| {
            // SAFETY: torch declares these functions so.
            unsafe {
                let function =
                    library.get::<unsafe extern "C" fn() -> i32>(symbol.to_bytes_with_nul());
                function.map(|function| function()).map_err(|error| too_old(symbol, &error))
            }
        };
        Ok(Self {
            bf16: number(c"aoti_torch_dtype_bfloat16")?,
            f16: number(c"aoti_torch_dtype_float16")?,
            f32: number(c"aoti_torch_dtype_float32")?,
            e4m3: number(c"aoti_torch_dtype_float8_e4m3fn")?,
            cpu: number(c"aoti_torch_device_type_cpu")?,
            cuda: number(c"aoti_torch_device_type_cuda")?,
        })
    }
}

static SHIM: OnceLock<Shim> = OnceLock::new();

/// torch's functions, once they are loaded.
pub(super) fn shim() -> Option<&'static Shim> {
    SHIM.get()
}

/// Finds torch's functions.
pub(super) fn load(cpu: &str, cuda: Option<&str>) -> Result<&'static Shim, Error> {
    let found = Shim::load(cpu, cuda)?;
    Ok(SHIM.get_or_init(|| found))
}

fn open(path: &str) -> Result<Library, Error> {
    // SAFETY: torch has loaded it, so nothing is run.
    let library = unsafe { Library::open(Some(path), RTLD_NOLOAD | RTLD_LAZY) };
    library
        .map_err(|error| Error::new(Class::Other, format!("torch has not loaded {path}: {error}")))
}

fn too_old(symbol: &CStr, error: &libloading::Error) -> Error {
    Error::new(
        Class::Other,
        format!(
            "this torch has no {}: flux_tp needs torch 2.10 or later ({error})",
            symbol.to_string_lossy()
        ),
    )
}

fn checked(what: &str, code: Code) -> Result<(), Error> {
    if code == 0 {
        Ok(())
    } else {
        Err(Error::new(Class::Other, format!("torch's {what} failed with code {code}")))
    }
}

impl Shim {
    /// Declares operators, for good.
    pub(super) fn declare<'s>(
        &self,
        namespace: &CStr,
        schemas: impl IntoIterator<Item = &'s CStr>,
    ) -> Result<(), Error> {
        let mut library = std::ptr::null_mut();
        // SAFETY: strings end with a zero; torch copies them.
        checked("library", unsafe {
            (self.library_fragment)(namespace.as_ptr(), c"flux_tp".as_ptr(), 0, &raw mut library)
        })?;
        schemas.into_iter().try_for_each(|schema| {
            // SAFETY: the library was made above and is never deleted.
            checked("operator", unsafe { (self.library_def)(library, schema.as_ptr()) })
        })
    }

    /// Registers kernels for a dispatch key, for good.
    pub(super) fn implement<'s>(
        &self,
        namespace: &CStr,
        key: &CStr,
        kernels: impl IntoIterator<Item = (&'s CStr, Boxed)>,
    ) -> Result<(), Error> {
        let mut library = std::ptr::null_mut();
        let of_key = self.library_of_key;
        // SAFETY: strings end with a zero; torch copies them.
        checked("library", unsafe {
            of_key(namespace.as_ptr(), key.as_ptr(), c"flux_tp".as_ptr(), 0, &raw mut library)
        })?;
        kernels.into_iter().try_for_each(|(name, kernel)| {
            // SAFETY: the library was made above and is never deleted; neither is the kernel.
            checked("kernel", unsafe {
                (self.library_impl)(library, name.as_ptr(), kernel, BUILD_VERSION)
            })
        })
    }

    /// Throws what becomes a RuntimeError. Whatever the caller owns must be dropped by then.
    pub(super) fn throw(&self, message: &CStr) {
        // SAFETY: strings end with a zero; torch copies them.
        unsafe {
            (self.check)(false, c"flux_tp".as_ptr(), c"flux_tp".as_ptr(), 0, message.as_ptr());
        }
    }

    /// torch's current stream of a device.
    pub(super) fn current_stream(&self, device: i32) -> Result<usize, Error> {
        let get = self
            .cuda_stream
            .ok_or_else(|| Error::new(Class::Other, "this torch is built without CUDA"))?;
        let mut stream = std::ptr::null_mut();
        // SAFETY: `stream` is a place for the result.
        checked("current stream", unsafe { get(device, &raw mut stream) })?;
        Ok(stream as usize)
    }

    /// Takes an optional argument.
    ///
    /// # Safety
    /// `argument` is an optional argument of a kernel, which is taken once.
    pub(super) unsafe fn take_optional(&self, argument: u64) -> Option<u64> {
        let boxed = argument as *mut u64;
        if boxed.is_null() {
            return None;
        }
        // SAFETY: the dispatcher has put the value there, and leaves it to the kernel to free.
        unsafe {
            let value = *boxed;
            (self.operator_delete)(boxed.cast());
            Some(value)
        }
    }

    /// Takes the elements of a list.
    ///
    /// # Safety
    /// `argument` is a list that a kernel was given, which is taken once.
    pub(super) unsafe fn take_list(&self, argument: u64) -> Result<Vec<u64>, Error> {
        let list = argument as ListHandle;
        let mut size = 0;
        // SAFETY: the dispatcher has put the list there; `size` is a place for the result.
        checked("list", unsafe { (self.list_size)(list, &raw mut size) })?;
        let item = |index| {
            let mut value = 0;
            // SAFETY: the list has an element at each index below its size; `value` is a place for
            // the result.
            checked("list", unsafe { (self.list_item)(list, index, &raw mut value) })?;
            Ok(value)
        };
        let items = (0..size).map(item).collect();
        // SAFETY: the list is the kernel's, and deleted once. Its elements stay.
        checked("list", unsafe { (self.delete_list)(list) })?;
        items
    }
}

/// An owned tensor.
pub(super) struct Tensor {
    shim: &'static Shim,
    handle: TensorHandle,
}

/// What a kernel needs to know of a tensor.
#[derive(Clone, Copy, Debug)]
pub(super) struct Meta {
    pub(super) address: u64,
    pub(super) dtype: i32,
    pub(super) device: (i32, i32),
    pub(super) dim: usize,
    /// Of the last two dimensions; a vector is one row.
    pub(super) sizes: [usize; 2],
    pub(super) strides: [i64; 2],
}

impl Tensor {
    /// # Safety
    /// `argument` is a tensor that a kernel was given, which is taken once.
    pub(super) unsafe fn take(shim: &'static Shim, argument: u64) -> Self {
        Self { shim, handle: argument as TensorHandle }
    }

    pub(super) fn meta(&self) -> Result<Meta, Error> {
        let Self { shim, handle } = *self;
        let (mut address, mut sizes, mut strides) =
            (std::ptr::null_mut(), std::ptr::null_mut(), std::ptr::null_mut());
        let (mut dim, mut dtype, mut kind, mut index) = (0, 0, 0, 0);
        // SAFETY: the tensor lives as long as `self`; the others are places for results.
        let codes = unsafe {
            [
                (shim.data_ptr)(handle, &raw mut address),
                (shim.dim)(handle, &raw mut dim),
                (shim.sizes)(handle, &raw mut sizes),
                (shim.strides)(handle, &raw mut strides),
                (shim.dtype)(handle, &raw mut dtype),
                (shim.device_type)(handle, &raw mut kind),
                (shim.device_index)(handle, &raw mut index),
            ]
        };
        codes.into_iter().try_for_each(|code| checked("tensor", code))?;
        let mut last = [[1, 0], [1, 1]];
        for (at, dimension) in (0..dim).rev().take(2).enumerate() {
            // SAFETY: both arrays have `dim` elements for as long as the tensor lives.
            last[1 - at] =
                unsafe { [*sizes.offset(dimension as isize), *strides.offset(dimension as isize)] };
        }
        let [[rows, row_stride], [cols, col_stride]] = last;
        // No size is below 0.
        let (sizes, strides) = (
            [rows, cols].map(|size| size.max(0).cast_unsigned() as usize),
            [row_stride, col_stride],
        );
        let dim = dim.max(0).cast_unsigned() as usize;
        Ok(Meta { address: address as u64, dtype, device: (kind, index), dim, sizes, strides })
    }
}

impl Drop for Tensor {
    fn drop(&mut self) {
        // SAFETY: owned, and deleted once.
        let _code = unsafe { (self.shim.delete_tensor)(self.handle) };
    }
}
