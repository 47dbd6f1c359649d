//! The operands of a run, from a safetensors file.
//!
//! Invariant: an [`Input`] has whole `x` of `[m, k]` and `w` of `[n, k]`, all of one 16-bit type, or
//! both of 8 bits with scales. Of what is wanted beside them it has what the file has.

use super::quantized::QuantizedX;
use super::scaled::{self, ScalePair};
use crate::harness::NoMemory;
use flux_core::{DType, Numerics};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Why a file cannot be an input.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(super) enum InputError {
    /// The file cannot be read.
    #[error("{} cannot be read", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    /// The file is a folder, a pipe, a device: reading it may have no end.
    #[error("{} cannot be read: it is not a regular file", .0.display())]
    NotAFile(PathBuf),
    /// The file names another, which Git LFS has not fetched.
    #[error(
        "{} is the pointer of a Git LFS file, not the file: fetch it with `git lfs pull`",
        .0.display()
    )]
    LfsPointer(PathBuf),
    /// The file is not safetensors, or is damaged or cut short.
    #[error("{} is not a whole safetensors file: {reason}", path.display())]
    Damaged { path: PathBuf, reason: String },
    /// A tensor is missing.
    #[error(
        "{} has no tensor {name:?}, and {} are read; it has {found}",
        path.display(),
        READ
    )]
    Missing { path: PathBuf, name: &'static str, found: String },
    /// A tensor has the wrong number of dimensions.
    #[error("tensor {name:?} has the shape {shape:?}: a matrix is needed")]
    NotAMatrix { name: &'static str, shape: Vec<usize> },
    /// A tensor beside `x` and `w` does not suit them.
    #[error("tensor {name:?} has the shape {shape:?}: {needed:?} is needed, {of}")]
    Shape { name: &'static str, shape: Vec<usize>, needed: Vec<usize>, of: &'static str },
    /// A tensor has another element type.
    #[error(
        "tensor {name:?} holds {dtype}: BF16 or F16 is needed, the same in all, but F8_E4M3 of w, and \
         perhaps of x, with scales"
    )]
    Type { name: &'static str, dtype: String },
    /// Scales have another element type.
    #[error("tensor {name:?} holds {dtype}: F32, BF16 or F16 is needed")]
    ScaleType { name: &'static str, dtype: String },
    /// Scales of rows and of blocks.
    #[error("there are weight_scale and weight_scale_inv: w has one of them")]
    TwoScales,
    /// No op has such scales.
    #[error(
        "weight_scale has one of each row of w, and input_scale one of each 1 x 128 of x: give \
         weight_scale_inv with it, or input_scale of rows"
    )]
    Forms,
    /// 8-bit operands are made of `x`.
    #[error(transparent)]
    Memory(#[from] NoMemory),
    /// The inner dimensions differ.
    #[error(
        "x is [{m}, {k_x}] and w is [{n}, {k_w}]: both need the same number of columns, as y = x * \
         transpose(w)"
    )]
    Mismatch { m: usize, k_x: usize, n: usize, k_w: usize },
}

/// Names of tensors, for an error.
const READ: &str = "x, w, and perhaps bias, residual, gain and scales of 8-bit operands";

/// How a pointer file begins (git-lfs, `docs/spec.md`).
const LFS_POINTER: &[u8] = b"version https://git-lfs.github.com/spec/";

/// The operands, as bytes of elements in the file's order, on any border: row-major, little-endian.
#[derive(Debug)]
pub(super) struct Input {
    /// Rows of `x`.
    pub m: usize,
    /// Rows of `w`.
    pub n: usize,
    /// Columns of both.
    pub k: usize,
    /// Element types.
    pub numerics: Numerics,
    /// Of operands of 8 bits.
    pub scales: Option<ScalePair>,
    /// Names of the tensors that are not read.
    pub unused: Vec<String>,
    file: Vec<u8>,
    /// In the place of `x`.
    quantised: Option<QuantizedX>,
    x: Range<usize>,
    w: Range<usize>,
    bias: Option<Range<usize>>,
    residual: Option<Range<usize>>,
    gain: Option<Range<usize>>,
}

/// What is read beside `x`, `w` and a bias.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Wanted {
    /// `[m, n]`, where the file has one.
    pub residual: bool,
    /// `[n]`, which the file must have.
    pub gain: bool,
}

impl Input {
    /// Reads and checks a file.
    pub(super) fn read(path: &Path, wanted: Wanted) -> Result<Self, InputError> {
        let unread = |source| InputError::Read { path: path.to_owned(), source };
        // Before it is opened: that alone would wait for who writes into a pipe.
        if !std::fs::metadata(path).map_err(unread)?.is_file() {
            return Err(InputError::NotAFile(path.to_owned()));
        }
        let file = std::fs::read(path).map_err(unread)?;
        Self::parse(path, file, wanted)
    }

    fn parse(path: &Path, file: Vec<u8>, wanted: Wanted) -> Result<Self, InputError> {
        if file.starts_with(LFS_POINTER) {
            return Err(InputError::LfsPointer(path.to_owned()));
        }
        let tensors = SafeTensors::deserialize(&file)
            .map_err(|e| InputError::Damaged { path: path.to_owned(), reason: e.to_string() })?;
        let (m, k_x, x_type, x) = matrix(path, &file, &tensors, "x")?;
        let (n, k_w, w_type, w) = matrix(path, &file, &tensors, "w")?;
        if k_x != k_w {
            return Err(InputError::Mismatch { m, k_x, n, k_w });
        }
        let missing = |name| {
            let found = found(name, tensors.names());
            InputError::Missing { path: path.to_owned(), name, found }
        };
        let (numerics, scaled) = match (x_type, w_type) {
            (_, DType::E4m3) => {
                let of_x = scaled::Extents { rows: m, cols: k_x, dtype: x_type };
                let of_w = scaled::Extents { rows: n, cols: k_w, dtype: w_type };
                let read = ScalePair::read(&tensors, missing, (of_x, &file[x.clone()]), of_w)?;
                let output = if x_type == w_type {
                    output_type(&tensors).unwrap_or(DType::Bf16)
                } else {
                    x_type
                };
                (Numerics::scaled(w_type, read.0.form(), output), Some(read))
            }
            _ if x_type == w_type => (x_type.into(), None),
            _ => {
                let dtype = format!("{w_type}, x {x_type}");
                return Err(InputError::Type { name: "w", dtype });
            }
        };
        let (scales, quantised) =
            scaled.map_or((None, None), |(scales, made)| (Some(scales), made));
        let of_w = "a number for each row of w";
        let further = |wanted: bool, name, needed: &[usize], of| {
            if wanted {
                further(&file, &tensors, name, numerics.output, needed, of)
            } else {
                Ok(None)
            }
        };
        let bias = further(true, "bias", &[n], of_w)?;
        let residual = further(wanted.residual, "residual", &[m, n], "as y has")?;
        let gain = further(wanted.gain, "gain", &[n], of_w)?;
        if wanted.gain && gain.is_none() {
            return Err(missing("gain"));
        }
        let read = [("bias", true), ("residual", wanted.residual), ("gain", wanted.gain)];
        let of_scales = [scaled::WEIGHT_SCALE, scaled::WEIGHT_SCALE_INV, scaled::INPUT_SCALE];
        let is_read = |name: &str| {
            ["x", "w"].contains(&name)
                || read.contains(&(name, true))
                || (scales.is_some() && of_scales.contains(&name))
        };
        let mut unused: Vec<_> =
            tensors.names().into_iter().filter(|name| !is_read(name)).map(str::to_owned).collect();
        unused.sort_unstable();
        Ok(Self {
            m,
            n,
            k: k_x,
            numerics,
            scales,
            unused,
            quantised,
            x,
            w,
            bias,
            residual,
            gain,
            file,
        })
    }

    /// Bytes of `bias`, `[n]`, where there is one.
    pub(super) fn bias(&self) -> Option<&[u8]> {
        Some(&self.file[self.bias.clone()?])
    }

    /// Bytes of `residual`, `[m, n]`, where there is one and it is wanted.
    pub(super) fn residual(&self) -> Option<&[u8]> {
        Some(&self.file[self.residual.clone()?])
    }

    /// Bytes of `gain`, `[n]`, where it is wanted.
    pub(super) fn gain(&self) -> Option<&[u8]> {
        Some(&self.file[self.gain.clone()?])
    }

    /// Bytes of `x`, `[m, k]`, and elements from a row to the next.
    pub(super) fn x(&self) -> (&[u8], usize) {
        match &self.quantised {
            Some(made) => (made.bytes(), made.row),
            None => (&self.file[self.x.clone()], self.k),
        }
    }

    /// Bytes of `w`, `[n, k]`.
    pub(super) fn w(&self) -> &[u8] {
        &self.file[self.w.clone()]
    }
}

type Matrix = (usize, usize, DType, Range<usize>);

fn matrix(
    path: &Path,
    file: &[u8],
    tensors: &SafeTensors<'_>,
    name: &'static str,
) -> Result<Matrix, InputError> {
    let Ok(tensor) = tensors.tensor(name) else {
        return Err(InputError::Missing {
            path: path.to_owned(),
            name,
            found: found(name, tensors.names()),
        });
    };
    let &[rows, cols] = tensor.shape() else {
        return Err(InputError::NotAMatrix { name, shape: tensor.shape().to_vec() });
    };
    let dtype = match tensor.dtype() {
        Dtype::F8_E4M3 => DType::E4m3,
        _ => dtype(name, &tensor)?,
    };
    Ok((rows, cols, dtype, bytes(file, &tensor)))
}

/// The tensors of a file without `wanted`, in words: first those whose last part is that name, then
/// the others by name; of many the first.
fn found(wanted: &str, mut names: Vec<&str>) -> String {
    const SHOWN: usize = 8;
    let close = |name: &str| {
        name.rsplit(['.', '/']).next().is_some_and(|part| part.eq_ignore_ascii_case(wanted))
    };
    names.sort_unstable_by_key(|name| (!close(name), *name));
    let shown: Vec<_> = names.iter().take(SHOWN).map(|name| format!("{name:?}")).collect();
    let more = names.len().saturating_sub(SHOWN);
    let rename = match names.first() {
        Some(name) if close(name) => format!(": rename {name:?} to {wanted:?} if it is that"),
        _ => String::new(),
    };
    match (names.len(), more) {
        (0, _) => "none".to_owned(),
        (_, 0) => format!("{}{rename}", shown.join(", ")),
        _ => format!("{} and {more} more{rename}", shown.join(", ")),
    }
}

/// The type of the first tensor that is in elements of `y`.
fn output_type(tensors: &SafeTensors<'_>) -> Option<DType> {
    let mut named = ["bias", "residual", "gain"].into_iter();
    named.find_map(|name| dtype(name, &tensors.tensor(name).ok()?).ok())
}

/// A tensor beside `x` and `w`, in elements of `y`, where the file has it.
fn further(
    file: &[u8],
    tensors: &SafeTensors<'_>,
    name: &'static str,
    y_type: DType,
    needed: &[usize],
    of: &'static str,
) -> Result<Option<Range<usize>>, InputError> {
    let Ok(tensor) = tensors.tensor(name) else { return Ok(None) };
    if tensor.shape() != needed {
        let shape = tensor.shape().to_vec();
        return Err(InputError::Shape { name, shape, needed: needed.to_vec(), of });
    }
    let found = dtype(name, &tensor)?;
    if found != y_type {
        return Err(InputError::Type { name, dtype: format!("{found}, x {y_type}") });
    }
    Ok(Some(bytes(file, &tensor)))
}

fn dtype(name: &'static str, tensor: &TensorView<'_>) -> Result<DType, InputError> {
    match tensor.dtype() {
        Dtype::BF16 => Ok(DType::Bf16),
        Dtype::F16 => Ok(DType::F16),
        other => Err(InputError::Type { name, dtype: format!("{other:?}") }),
    }
}

/// Where a tensor's bytes lie in the file that the view borrows.
fn bytes(file: &[u8], tensor: &TensorView<'_>) -> Range<usize> {
    let start = tensor.data().as_ptr().addr() - file.as_ptr().addr();
    start..start + tensor.data().len()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(tensors: &[(&str, Dtype, &[usize])]) -> Vec<u8> {
        let data = vec![0; 1 << 12];
        let views = tensors.iter().map(|&(name, dtype, shape)| {
            let bytes = shape.iter().product::<usize>() * dtype.bitsize() / 8;
            (name, TensorView::new(dtype, shape.to_vec(), &data[..bytes]).unwrap())
        });
        safetensors::serialize(views, None).unwrap()
    }

    fn parse(file: Vec<u8>) -> Result<Input, InputError> {
        Input::parse(Path::new("in.safetensors"), file, Wanted { residual: true, gain: false })
    }

    #[test]
    fn a_good_file_gives_the_extents_and_the_elements() {
        let input =
            parse(file(&[("x", Dtype::F16, &[4, 16]), ("w", Dtype::F16, &[24, 16])])).unwrap();
        assert_eq!((input.m, input.n, input.k, input.numerics), (4, 24, 16, DType::F16.into()));
        assert_eq!((input.x().0.len(), input.x().1, input.w().len()), (128, 16, 768));
    }

    #[test]
    fn a_file_that_is_cut_short_or_damaged_is_refused() {
        let good = file(&[("x", Dtype::BF16, &[4, 16]), ("w", Dtype::BF16, &[24, 16])]);
        for length in [0, 7, 8, 40, good.len() - 1] {
            assert!(
                matches!(parse(good[..length].to_vec()), Err(InputError::Damaged { .. })),
                "{length} bytes"
            );
        }
        let mut longer = good.clone();
        longer.push(0);
        assert!(matches!(parse(longer), Err(InputError::Damaged { .. })));
        for byte in [0, 7, 9, 20] {
            let mut damaged = good.clone();
            damaged[byte] ^= 0x55;
            assert!(parse(damaged).is_err(), "byte {byte}");
        }
    }

    #[test]
    fn a_pointer_of_git_lfs_is_told_from_a_damaged_file() {
        let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n";
        let text = parse(pointer.into()).unwrap_err().to_string();
        assert_eq!(
            text,
            "in.safetensors is the pointer of a Git LFS file, not the file: fetch it with `git lfs \
             pull`"
        );
    }

    #[test]
    fn the_tensors_of_a_checkpoint_are_named_in_order_and_in_short() {
        let layers: Vec<_> = (0..20_000)
            .map(|layer| format!("model.layers.{layer:05}.mlp.up_proj.weight"))
            .collect();
        let names = |more: &[&'static str]| {
            layers.iter().rev().map(String::as_str).chain(more.iter().copied()).collect::<Vec<_>>()
        };
        let text = found("x", names(&[]));
        assert!(
            text.starts_with(r#""model.layers.00000.mlp.up_proj.weight", "model.layers.00001."#),
            "{text}"
        );
        assert!(
            text.ends_with(r#""model.layers.00007.mlp.up_proj.weight" and 19992 more"#),
            "{text}"
        );
        let close = found("x", names(&["mlp.X"]));
        assert!(
            close.starts_with(r#""mlp.X", "model.layers.00000."#)
                && close.ends_with(r#"rename "mlp.X" to "x" if it is that"#),
            "{close}"
        );
        assert_eq!(found("x", Vec::new()), "none");
    }

    #[test]
    fn operands_that_do_not_fit_are_named_with_their_values() {
        let message =
            |tensors: &[(&str, Dtype, &[usize])]| parse(file(tensors)).unwrap_err().to_string();
        let x: (&str, Dtype, &[usize]) = ("x", Dtype::BF16, &[4, 16]);
        assert_eq!(
            message(&[x]),
            r#"in.safetensors has no tensor "w", and x, w, and perhaps bias, residual, gain and scales of 8-bit operands are read; it has "x""#
        );
        assert!(
            message(&[x, ("w", Dtype::BF16, &[24, 8])]).contains("x is [4, 16] and w is [24, 8]")
        );
        assert!(message(&[x, ("w", Dtype::F16, &[24, 16])]).contains("holds fp16, x bf16"));
        assert!(message(&[x, ("w", Dtype::F32, &[24, 16])]).contains("holds F32"));
        assert!(message(&[x, ("w", Dtype::BF16, &[24 * 16])]).contains("[384]"));
        let w: (&str, Dtype, &[usize]) = ("w", Dtype::BF16, &[24, 16]);
        assert!(
            message(&[x, w, ("bias", Dtype::BF16, &[16])])
                .contains("has the shape [16]: [24] is needed, a number for each row of w")
        );
        assert!(
            message(&[x, w, ("residual", Dtype::BF16, &[4, 16])])
                .contains("\"residual\" has the shape [4, 16]: [4, 24] is needed, as y has")
        );
        assert!(message(&[x, w, ("bias", Dtype::F16, &[24])]).contains("holds fp16, x bf16"));
    }

    #[test]
    fn a_norm_needs_its_gain_and_what_is_not_wanted_is_not_read() {
        let whole = file(&[
            ("x", Dtype::BF16, &[4, 16]),
            ("w", Dtype::BF16, &[24, 16]),
            ("residual", Dtype::F32, &[1]),
            ("gain", Dtype::BF16, &[24]),
        ]);
        let parse = |file, wanted| Input::parse(Path::new("in.safetensors"), file, wanted);
        let plain = parse(whole.clone(), Wanted::default()).unwrap();
        assert_eq!(plain.unused, ["gain", "residual"]);
        let normed = parse(whole, Wanted { residual: false, gain: true }).unwrap();
        assert_eq!(
            (normed.gain().unwrap().len(), normed.unused.as_slice()),
            (48, &["residual".to_owned()][..])
        );
        let without = file(&[("x", Dtype::BF16, &[4, 16]), ("w", Dtype::BF16, &[24, 16])]);
        let error = parse(without, Wanted { residual: true, gain: true }).unwrap_err().to_string();
        assert!(error.starts_with(r#"in.safetensors has no tensor "gain""#), "{error}");
    }
}
