//! The resources of a compiled kernel: registers, spills, stack, shared memory, and whether `wgmma`
//! runs asynchronously.
//!
//! Invariant: a function that the log does not mention is an error, so a changed option or log
//! format cannot pass for a kernel without spills.

mod elf;
mod log;

pub use elf::ImageError;

/// The resources of one function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FunctionReport {
    /// Its symbol.
    pub function: String,
    /// Registers of a thread at launch.
    pub registers: u32,
    /// Bytes of stack of a thread: where not zero, it uses local memory.
    pub stack_bytes: u32,
    /// Bytes that a thread stores to local memory because registers run out.
    pub spill_store_bytes: u32,
    /// Bytes that it loads again.
    pub spill_load_bytes: u32,
    /// Static shared memory of a CTA, in bytes; what a launch adds is not known here.
    pub shared_bytes: u32,
    /// Instructions, padding included.
    pub instructions: u32,
    /// Whether the compiler has made its `wgmma` instructions wait for one another.
    pub serialized: bool,
}

/// The resources of a translation unit's functions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// Name of the cubin.
    pub name: String,
    /// Its functions, by symbol.
    pub functions: Vec<FunctionReport>,
    /// Lines of the log that warn.
    pub warnings: Vec<String>,
}

impl Report {
    /// Of PTX, whose functions have no resources yet.
    pub(crate) fn of_ptx(name: &str) -> Self {
        Self { name: name.to_owned(), functions: Vec::new(), warnings: Vec::new() }
    }

    /// Reads a cubin and the log of its compilation, which was asked for resources
    /// (`--ptxas-options=-v`).
    ///
    /// # Errors
    /// [`ImageError`] when the image is not a cubin as we know it, or the log lacks one of its
    /// functions.
    pub fn new(name: &str, cubin: &[u8], log: &str) -> Result<Self, ImageError> {
        let mut functions = Vec::new();
        for code in elf::functions(cubin)? {
            let Some(said) = log::function(log, &code.name) else {
                return Err(ImageError::NotInLog { function: code.name });
            };
            functions.push(FunctionReport {
                registers: code.registers,
                stack_bytes: code.stack_bytes,
                spill_store_bytes: said.spill_stores,
                spill_load_bytes: said.spill_loads,
                shared_bytes: said.shared,
                instructions: code.instructions,
                serialized: log::serialized(log, &code.name),
                function: code.name,
            });
        }
        functions.sort_by(|a, b| a.function.cmp(&b.function));
        Ok(Self { name: name.to_owned(), functions, warnings: log::warnings(log) })
    }

    /// Defects of a kernel that has to be fast, in words: spills, local memory, serialized `wgmma`.
    pub fn defects(&self) -> Vec<String> {
        let mut defects = Vec::new();
        for f in &self.functions {
            let mut defect =
                |what: String| defects.push(format!("{}: {}: {what}", self.name, f.function));
            if f.spill_store_bytes + f.spill_load_bytes > 0 {
                defect(format!(
                    "spills registers: {} bytes stored, {} loaded",
                    f.spill_store_bytes, f.spill_load_bytes
                ));
            }
            if f.stack_bytes > 0 {
                defect(format!("uses local memory: {} bytes of stack", f.stack_bytes));
            }
            if f.serialized {
                defect("its wgmma instructions are serialized".to_owned());
            }
        }
        defects
    }
}
