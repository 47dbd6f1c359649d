//! Compiling CUDA C++ to cubins with NVRTC, which needs no GPU, no toolkit and no driver.
//!
//! Invariant: a compilation reads nothing but its [`KernelSource`], so equal sources give equal
//! cubins with one version of NVRTC.

mod library;

pub use library::{NvrtcUnavailable, Version};

pub use crate::arch::Arch;
use crate::inspect::Report;
use library::Library;
use std::ffi::{CString, c_char, c_int};
use std::path::Path;
use std::ptr::null;
use std::sync::OnceLock;

/// Everything that a compilation depends on, besides the version of NVRTC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KernelSource<'a> {
    /// Name of the cubin; letters, digits, `_`, `-` and `.`.
    pub name: &'a str,
    /// The translation unit.
    pub text: &'a str,
    /// Every header that may be included: its name in `#include`, and its text.
    pub headers: &'a [(&'a str, &'a str)],
    /// Options besides the architecture.
    pub options: &'a [&'a str],
    /// Architecture.
    pub arch: Arch,
}

impl<'a> KernelSource<'a> {
    /// Options of all our sources. The last one makes the log report resources for [`Report`].
    pub const OPTIONS: &'static [&'static str] =
        &["--std=c++20", "--device-as-default-execution-space", "--ptxas-options=-v"];

    /// One of our translation units, with our headers and options. Of PTX the oldest that has its
    /// instructions.
    pub fn ours(source: &'a crate::sources::Source, arch: Arch) -> Self {
        Self {
            name: &source.name,
            text: &source.text,
            headers: crate::sources::headers(),
            options: Self::OPTIONS,
            arch: if arch.is_ptx() { source.ptx } else { arch },
        }
    }
}

/// A compiled translation unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Compiled {
    /// The image that the driver loads: a cubin, or PTX.
    pub cubin: Vec<u8>,
    /// What the compiler said: warnings, and resources of each kernel.
    pub log: String,
    /// Registers, spills, stack, shared memory of each kernel.
    pub report: Report,
}

/// Why there is no cubin.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CompileError {
    /// There is no compiler.
    #[error(transparent)]
    Unavailable(#[from] NvrtcUnavailable),
    /// The compiler refused the source.
    #[error("{name} does not compile with NVRTC {version}:\n{log}")]
    Rejected {
        /// Name of the source.
        name: String,
        /// Version of NVRTC.
        version: Version,
        /// What the compiler said.
        log: String,
    },
    /// A call failed for another reason than the source.
    #[error("compiling {name}: {call}: {reason}")]
    Call {
        /// Name of the source.
        name: String,
        /// The NVRTC call.
        call: &'static str,
        /// What the library said.
        reason: String,
    },
    /// A name, a text or an option holds a NUL character.
    #[error("{name}: its name, text, headers or options hold a NUL character")]
    Nul {
        /// Name of the source.
        name: String,
    },
    /// The image is not a cubin as we know it.
    #[error("{name}: {reason}")]
    Image {
        /// Name of the source.
        name: String,
        /// What is wrong with it.
        reason: String,
    },
}

flux_core::debug_is_text!(CompileError);

/// A loaded NVRTC library. It may be used from several threads at once.
pub struct Nvrtc(Library);

impl std::fmt::Debug for Nvrtc {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Nvrtc")
            .field("path", &self.path())
            .field("version", &self.version())
            .finish()
    }
}

impl Nvrtc {
    /// The oldest version that is used: the first that compiles for `sm_90a`.
    pub const OLDEST: Version = library::OLDEST;

    /// The library of this process, searched for at the first call: only `FLUX_NVRTC_LIB` if it is
    /// set, else in this order:
    /// - `FLUX_CUDA_LIB_DIR`;
    /// - the toolkits in `CUDA_HOME`, `CUDA_PATH` and `/usr/local/cuda`;
    /// - the wheels of `VIRTUAL_ENV`, the libraries and wheels of `CONDA_PREFIX`, and the wheels of
    ///   the `python3` on the path;
    /// - the folder of the executable, and where the loader looks.
    ///
    /// # Errors
    /// [`NvrtcUnavailable`] lists what was tried and what to install.
    pub fn get() -> Result<&'static Self, NvrtcUnavailable> {
        static NVRTC: OnceLock<Result<Nvrtc, NvrtcUnavailable>> = OnceLock::new();
        NVRTC.get_or_init(|| Library::find().map(Self)).as_ref().map_err(Clone::clone)
    }

    /// The library in this file.
    ///
    /// # Errors
    /// [`NvrtcUnavailable`] says why it cannot be used.
    pub fn open(path: &Path) -> Result<Self, NvrtcUnavailable> {
        let unavailable =
            |reason| NvrtcUnavailable { tried: vec![format!("{} ({reason})", path.display())] };
        Library::open(path).map(Self).map_err(unavailable)
    }

    /// The library's file, or the name by which the loader found it.
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// The library's version.
    pub const fn version(&self) -> Version {
        self.0.version
    }

    /// The library's release, as in `13.0.88`: several have one [`Self::version`]. It is what PTX
    /// names as its compiler.
    ///
    /// # Errors
    /// As [`Self::compile`]; [`CompileError::Image`] when PTX names no release.
    pub fn release(&self) -> Result<String, CompileError> {
        let (name, arch) = ("empty", Arch::Compute80);
        let empty = KernelSource { name, text: "", headers: &[], options: &[], arch };
        let ptx = self.compile(&empty)?.cubin;
        release(&String::from_utf8_lossy(&ptx)).map(str::to_owned).ok_or_else(|| {
            let reason = "its PTX does not name the compiler's release".to_owned();
            CompileError::Image { name: name.to_owned(), reason }
        })
    }

    /// Compiles a translation unit.
    ///
    /// # Errors
    /// [`CompileError::Rejected`] with the compiler's log; [`CompileError::Nul`];
    /// [`CompileError::Call`].
    pub fn compile(&self, source: &KernelSource<'_>) -> Result<Compiled, CompileError> {
        let name = || source.name.to_owned();
        let text = |text: &str| CString::new(text).map_err(|_| CompileError::Nul { name: name() });
        let arch = format!("--gpu-architecture={}", source.arch.name());
        // What comes from the driver's cache has no log, and so no report.
        let no_cache = (self.version().major >= 13).then_some("--no-cache");
        let options =
            std::iter::once(arch.as_str()).chain(no_cache).chain(source.options.iter().copied());
        let options = options.map(text).collect::<Result<Vec<_>, _>>()?;
        let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let program = Program::create(&self.0, source)?;
        let count = c_int::try_from(options.len()).unwrap_or(c_int::MAX);
        // SAFETY: the program exists, and the pointers are to at least `count` terminated strings
        // that outlive the call.
        let code = unsafe { (self.0.entries.compile)(program.handle, count, options.as_ptr()) };
        let log = program.log()?;
        if code != 0 {
            let log = if log.trim().is_empty() { self.0.text(code) } else { log };
            return Err(CompileError::Rejected { name: name(), version: self.version(), log });
        }
        if source.arch.is_ptx() {
            // Its resources are known when a driver has compiled it.
            return Ok(Compiled {
                cubin: program.ptx()?,
                log,
                report: Report::of_ptx(source.name),
            });
        }
        let cubin = program.cubin()?;
        let report = Report::new(source.name, &cubin, &log)
            .map_err(|error| CompileError::Image { name: name(), reason: error.to_string() })?;
        Ok(Compiled { cubin, log, report })
    }
}

/// The compiler's release in a line of PTX: `// Cuda compilation tools, release 13.0, V13.0.88`.
fn release(ptx: &str) -> Option<&str> {
    let mut lines = ptx.lines().filter(|line| line.contains("Cuda compilation tools"));
    lines.next()?.rsplit_once(", V").map(|(_, release)| release.trim())
}

/// An NVRTC program, destroyed when dropped.
struct Program<'l> {
    library: &'l Library,
    handle: usize,
    name: String,
}

impl<'l> Program<'l> {
    fn create(library: &'l Library, source: &KernelSource<'_>) -> Result<Self, CompileError> {
        let name = source.name.to_owned();
        let text =
            |text: &str| CString::new(text).map_err(|_| CompileError::Nul { name: name.clone() });
        let file = text(&format!("{}.cu", source.name))?;
        let unit = text(source.text)?;
        let texts =
            source.headers.iter().map(|(_, body)| text(body)).collect::<Result<Vec<_>, _>>()?;
        let names =
            source.headers.iter().map(|(name, _)| text(name)).collect::<Result<Vec<_>, _>>()?;
        let pointers = |strings: &[CString]| strings.iter().map(|s| s.as_ptr()).collect::<Vec<_>>();
        let (texts, names) = (pointers(&texts), pointers(&names));
        let count = c_int::try_from(names.len()).unwrap_or(c_int::MAX);
        let (texts, names) =
            if count == 0 { (null(), null()) } else { (texts.as_ptr(), names.as_ptr()) };
        let mut handle = 0;
        // SAFETY: the out pointer is valid; the strings are terminated, the arrays hold at least
        // `count` of them, and the library copies them all.
        let code = unsafe {
            (library.entries.create)(
                &raw mut handle,
                unit.as_ptr(),
                file.as_ptr(),
                count,
                texts,
                names,
            )
        };
        let program = Self { library, handle, name };
        program.check("nvrtcCreateProgram", code)?;
        Ok(program)
    }

    fn check(&self, call: &'static str, code: c_int) -> Result<(), CompileError> {
        if code == 0 {
            Ok(())
        } else {
            Err(CompileError::Call {
                name: self.name.clone(),
                call,
                reason: self.library.text(code),
            })
        }
    }

    fn log(&self) -> Result<String, CompileError> {
        let bytes = self.bytes(
            "nvrtcGetProgramLogSize",
            self.library.entries.log_size,
            "nvrtcGetProgramLog",
            self.library.entries.log,
        )?;
        Ok(String::from_utf8_lossy(&bytes).trim_end_matches('\0').to_owned())
    }

    fn cubin(&self) -> Result<Vec<u8>, CompileError> {
        self.bytes(
            "nvrtcGetCUBINSize",
            self.library.entries.cubin_size,
            "nvrtcGetCUBIN",
            self.library.entries.cubin,
        )
    }

    /// Terminated, as the driver takes it.
    fn ptx(&self) -> Result<Vec<u8>, CompileError> {
        self.bytes(
            "nvrtcGetPTXSize",
            self.library.entries.ptx_size,
            "nvrtcGetPTX",
            self.library.entries.ptx,
        )
    }

    fn bytes(
        &self,
        size_call: &'static str,
        size: unsafe extern "C" fn(usize, *mut usize) -> c_int,
        read_call: &'static str,
        read: unsafe extern "C" fn(usize, *mut c_char) -> c_int,
    ) -> Result<Vec<u8>, CompileError> {
        let mut length = 0;
        // SAFETY: the program exists and the out pointer is valid.
        self.check(size_call, unsafe { size(self.handle, &raw mut length) })?;
        let mut bytes = vec![0u8; length];
        // SAFETY: the program exists, and the library writes the number of bytes that it has just
        // stated.
        self.check(read_call, unsafe { read(self.handle, bytes.as_mut_ptr().cast()) })?;
        Ok(bytes)
    }
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        if self.handle != 0 {
            // SAFETY: the program exists, and nobody uses it any more.
            unsafe { (self.library.entries.destroy)(&raw mut self.handle) };
        }
    }
}
