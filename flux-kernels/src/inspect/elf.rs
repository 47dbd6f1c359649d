//! The sections of a cubin, an ELF file, that describe its functions.
//!
//! Section `.text.NAME` holds a function's instructions, 16 bytes each. Section `.nv.info` holds
//! attributes: a format byte, a tag byte, and a length of two bytes. The two that are used here
//! follow with a symbol's index and a value, four bytes each.

use std::collections::HashMap;

/// The image is not a cubin as we know it.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ImageError {
    /// It is cut off, or not an ELF file for CUDA.
    #[error("the image is not a cubin: {what}")]
    NotACubin {
        /// What does not fit.
        what: &'static str,
    },
    /// A function has no attributes.
    #[error("the image says nothing of the registers or the stack of {function}")]
    NoAttributes {
        /// The function.
        function: String,
    },
    /// The log says nothing of a function.
    #[error("the compiler's log says nothing of {function}: was it asked with --ptxas-options=-v?")]
    NotInLog {
        /// The function.
        function: String,
    },
}

flux_core::debug_is_text!(ImageError);

/// A function of a cubin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Code {
    pub(super) name: String,
    pub(super) registers: u32,
    pub(super) stack_bytes: u32,
    pub(super) instructions: u32,
}

const EM_CUDA: u16 = 190;
const SHT_SYMTAB: u32 = 2;
const ATTRIBUTE_FRAME_SIZE: u8 = 0x11;
const ATTRIBUTE_REGISTERS: u8 = 0x2f;
/// Format of an attribute with a length; all others take four bytes.
const FORMAT_SIZED: u8 = 4;
const INSTRUCTION_BYTES: u64 = 16;

struct Section<'a> {
    name: &'a str,
    kind: u32,
    link: u32,
    size: u64,
    body: &'a [u8],
}

/// The functions of a cubin.
pub(super) fn functions(image: &[u8]) -> Result<Vec<Code>, ImageError> {
    let sections = sections(image)?;
    let symtab = sections
        .iter()
        .find(|s| s.kind == SHT_SYMTAB)
        .ok_or(ImageError::NotACubin { what: "it has no symbols" })?;
    let strings = sections
        .get(symtab.link as usize)
        .ok_or(ImageError::NotACubin { what: "its symbols have no names" })?;
    let info = sections
        .iter()
        .find(|s| s.name == ".nv.info")
        .ok_or(ImageError::NotACubin { what: "it has no attributes" })?;

    let mut registers = HashMap::new();
    let mut stack = HashMap::new();
    let mut rest = info.body;
    while let [format, tag, ..] = *rest {
        let bytes = if format == FORMAT_SIZED { 4 + usize::from(u16_at(rest, 2)?) } else { 4 };
        if format == FORMAT_SIZED && bytes == 12 {
            let (symbol, value) = (u32_at(rest, 4)?, u32_at(rest, 8)?);
            let name = text_at(strings.body, u32_at(symtab.body, symbol as usize * 24)? as usize)?;
            match tag {
                ATTRIBUTE_REGISTERS => drop(registers.insert(name, value)),
                ATTRIBUTE_FRAME_SIZE => drop(stack.insert(name, value)),
                _ => {}
            }
        }
        rest = rest.get(bytes..).unwrap_or_default();
    }

    let mut functions = Vec::new();
    for section in &sections {
        let Some(name) = section.name.strip_prefix(".text.") else { continue };
        let (Some(&registers), Some(&stack_bytes)) = (registers.get(name), stack.get(name)) else {
            return Err(ImageError::NoAttributes { function: name.to_owned() });
        };
        let instructions = u32::try_from(section.size / INSTRUCTION_BYTES).unwrap_or(u32::MAX);
        functions.push(Code { name: name.to_owned(), registers, stack_bytes, instructions });
    }
    Ok(functions)
}

fn sections(image: &[u8]) -> Result<Vec<Section<'_>>, ImageError> {
    if !image.starts_with(b"\x7fELF\x02\x01") || u16_at(image, 18)? != EM_CUDA {
        return Err(ImageError::NotACubin {
            what: "it is not a 64-bit little-endian ELF file for CUDA",
        });
    }
    let (table, entry, count) =
        (u64_at(image, 40)?, usize::from(u16_at(image, 58)?), usize::from(u16_at(image, 60)?));
    let names = usize::from(u16_at(image, 62)?);
    let table = usize::try_from(table).map_err(|_| CUT)?;
    let header = |index: usize| {
        index
            .checked_mul(entry)
            .and_then(|at| at.checked_add(table))
            .and_then(|at| image.get(at..))
            .ok_or(CUT)
    };
    let body = |header: &[u8]| -> Result<&[u8], ImageError> {
        const NOBITS: u32 = 8;
        if u32_at(header, 4)? == NOBITS {
            return Ok(&[]);
        }
        let (from, size) =
            (usize::try_from(u64_at(header, 24)?), usize::try_from(u64_at(header, 32)?));
        let (from, size) = (from.map_err(|_| CUT)?, size.map_err(|_| CUT)?);
        image.get(from..).and_then(|rest| rest.get(..size)).ok_or(CUT)
    };
    let strings = body(header(names)?)?;
    (0..count)
        .map(|index| {
            let header = header(index)?;
            Ok(Section {
                name: text_at(strings, u32_at(header, 0)? as usize)?,
                kind: u32_at(header, 4)?,
                link: u32_at(header, 40)?,
                size: u64_at(header, 32)?,
                body: body(header)?,
            })
        })
        .collect()
}

const CUT: ImageError = ImageError::NotACubin { what: "it is cut off" };

fn array_at<const N: usize>(bytes: &[u8], at: usize) -> Result<[u8; N], ImageError> {
    bytes.get(at..).and_then(|rest| rest.first_chunk()).copied().ok_or(CUT)
}

fn u16_at(bytes: &[u8], at: usize) -> Result<u16, ImageError> {
    array_at(bytes, at).map(u16::from_le_bytes)
}

fn u32_at(bytes: &[u8], at: usize) -> Result<u32, ImageError> {
    array_at(bytes, at).map(u32::from_le_bytes)
}

fn u64_at(bytes: &[u8], at: usize) -> Result<u64, ImageError> {
    array_at(bytes, at).map(u64::from_le_bytes)
}

fn text_at(bytes: &[u8], at: usize) -> Result<&str, ImageError> {
    let rest = bytes.get(at..).ok_or(CUT)?;
    let end = rest.iter().position(|&byte| byte == 0).ok_or(CUT)?;
    std::str::from_utf8(&rest[..end])
        .map_err(|_| ImageError::NotACubin { what: "a name in it is not text" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_a_cubin_is_refused() {
        for image in [
            &b""[..],
            b"\x7fELF",
            &[0; 200],
            b"\x7fELF\x02\x01 and then something else that is long enough to be a header......",
        ] {
            assert!(matches!(functions(image), Err(ImageError::NotACubin { .. })), "{image:?}");
        }
    }
}
