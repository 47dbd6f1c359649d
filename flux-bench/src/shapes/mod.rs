//! The layers that are measured, as command lines name them.
//!
//! Invariant: what AllGather-GEMM of an MLP writes is what GEMM-ReduceScatter and GEMM-AllReduce
//! read. Where a model's MLP is gated, it has a gate and an up for each column of that.

mod models;
mod words;

pub(crate) use words::{Rows, Shape, Shapes};

use anyhow::{Context, ensure};
use clap::builder::ArgPredicate;
use flux_core::{DType, Numerics, OpKind, Partials, Problem, Scales, SumsTo, WorldSize};

/// One op's global extents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Gemm {
    op: OpKind,
    n: usize,
    k: usize,
}

/// Which layers a command works on.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct LayerArgs {
    /// Global rows, as in 64,512..8192 (a range is its powers of two); where left out, some that
    /// suit command and machine
    #[arg(long, value_name = "M,...")]
    pub(crate) ms: Option<Rows>,
    /// Layers: names, HIDDENxFFN or OP:n=N,k=K, as in llama3-8b.qkv,4096x14336; where left out, the
    /// MLP of gpt3 and llama70b, and on the host a sixteenth of both. Of gated MLPs ag_gemm has
    /// gates and ups, but of llama70b the ups alone
    #[arg(long, value_name = "SHAPE,...")]
    pub(crate) shapes: Option<Shapes>,
    /// Ops: ag_gemm, gemm_rs, gemm_ar; a layer of one op is left out where that is not among them
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "OP,...",
        default_value = "ag_gemm,gemm_rs",
        default_value_if("trace_m", ArgPredicate::IsPresent, "gemm_ar"),
        value_parser = parse_op,
    )]
    pub(crate) ops: Vec<OpKind>,
    #[command(flatten)]
    pub(crate) types: TypeArgs,
}

/// The element types of layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::Args)]
pub(crate) struct TypeArgs {
    /// Element type: bf16, fp16, or fp8, which is operands in e4m3 with scales and outputs in bf16
    #[arg(long, value_name = "TYPE", default_value = "bf16", value_parser = parse_dtype)]
    pub(crate) dtype: DType,
    /// Scales of fp8: of a tensor, of each row of x and of w, or of 1 x 128 of x and 128 x 128 of
    /// w; where left out, row
    #[arg(long, value_name = "SCALES", value_parser = parse_scales)]
    pub(crate) scales: Option<Scales>,
    /// Let tensor cores add all products of fp8, which keep fewer bits than fp32
    #[arg(long)]
    pub(crate) fast_accumulation: bool,
}

impl TypeArgs {
    /// What they ask for.
    pub(crate) fn numerics(self) -> anyhow::Result<Numerics> {
        let Self { dtype, scales, fast_accumulation } = self;
        if !dtype.is_quantized() {
            ensure!(
                scales.is_none() && !fast_accumulation,
                "--scales and --fast-accumulation are of --dtype fp8, and it is {dtype}"
            );
            return Ok(dtype.into());
        }
        let scales = scales.unwrap_or(Scales::Row);
        let numerics =
            Numerics { fast_accumulation, ..Numerics::scaled(dtype, scales, DType::Bf16) };
        ensure!(
            numerics.is_supported(),
            "--fast-accumulation with --scales {scales}: sums leave the tensor cores every block"
        );
        Ok(numerics)
    }

    /// The type of operands and outputs, for a command without scaled operands.
    pub(crate) fn of_one_type(self, command: &str) -> anyhow::Result<DType> {
        let numerics = self.numerics()?;
        ensure!(
            numerics.scales == Scales::None,
            "{command} takes no fp8: use --dtype bf16, or bench, lab core and lab peers for fp8"
        );
        Ok(numerics.operand)
    }
}

impl LayerArgs {
    /// The layers for `world`; where no rows are asked for, at `ms` on GPUs and 512 on the host.
    pub(crate) fn layers(
        &self,
        world: WorldSize,
        on_gpus: bool,
        ms: &[usize],
    ) -> anyhow::Result<Vec<Layer>> {
        let ms = match (&self.ms, on_gpus) {
            (Some(Rows(given)), _) => given,
            (None, true) => ms,
            (None, false) => &[512],
        };
        layers(&self.shapes(on_gpus)?, &self.ops, ms, self.types.numerics()?, world)
    }

    /// The layers for `world` with `m` rows, whatever rows are asked for.
    pub(crate) fn layers_of(
        &self,
        world: WorldSize,
        on_gpus: bool,
        m: usize,
    ) -> anyhow::Result<Vec<Layer>> {
        layers(&self.shapes(on_gpus)?, &self.ops, &[m], self.types.numerics()?, world)
    }

    fn shapes(&self, on_gpus: bool) -> anyhow::Result<Shapes> {
        let usual = if on_gpus { "gpt3,llama70b" } else { "gpt3/16,llama70b/16" };
        Ok(self.shapes.clone().map_or_else(|| usual.parse(), Ok)?)
    }
}

/// The layers with partial sums of this type; those in fp32 by names of their own. Sums alone have
/// them.
pub(crate) fn with_partials(layers: Vec<Layer>, partials: Partials) -> anyhow::Result<Vec<Layer>> {
    if partials == Partials::Output {
        return Ok(layers);
    }
    let mut layers = with_suffix(layers, "--partials f32", "+f32")?;
    for Layer { problem, .. } in &mut layers {
        *problem = problem.with_partials(partials);
    }
    Ok(layers)
}

/// The layers by names of their own, with an option that sums alone have.
pub(crate) fn with_suffix(
    mut layers: Vec<Layer>,
    option: &str,
    suffix: &str,
) -> anyhow::Result<Vec<Layer>> {
    let sums = layers.iter().all(|layer| layer.problem.op().reduces());
    ensure!(sums, "{option} is of gemm_rs and gemm_ar: name them with --ops");
    for layer in &mut layers {
        layer.name += suffix;
    }
    Ok(layers)
}

/// Refuses layers whose ranks have unequal numbers of rows, for what has no other.
pub(crate) fn ensure_equal_shards(layers: &[Layer]) -> anyhow::Result<()> {
    for Layer { name, problem } in layers {
        let (m, world) = (problem.m(), problem.world());
        let padded = m.next_multiple_of(world.get());
        ensure!(
            padded == m || problem.op().sums_to() == SumsTo::All,
            "{} of {name}: m = {m} is not divisible by the world size {world}: pad m to {padded}",
            problem.op()
        );
    }
    Ok(())
}

/// One op of a shape at some number of rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layer {
    /// The shape's word.
    pub name: String,
    /// The problem.
    pub problem: Problem,
}

/// Every one of `ops` of every shape at every `m`, with these element types, for `world` ranks;
/// `m` changes fastest.
///
/// # Errors
/// A shape that the world cannot split, with its name, or none that has one of the ops.
pub fn layers(
    shapes: &Shapes,
    ops: &[OpKind],
    ms: &[usize],
    numerics: impl Into<Numerics>,
    world: WorldSize,
) -> anyhow::Result<Vec<Layer>> {
    let (mut layers, numerics) = (Vec::new(), numerics.into());
    for shape in &shapes.0 {
        for &op in ops {
            let Some((n, k)) = shape.extents(op) else { continue };
            for &m in ms {
                let problem = Problem::new(op, m, n, k, numerics, world)
                    .with_context(|| format!("{op} of {shape}"))?;
                layers.push(Layer { name: shape.name().to_owned(), problem });
            }
        }
    }
    let named = || ops.iter().map(|op| op.name()).collect::<Vec<_>>().join(" or ");
    ensure!(
        !layers.is_empty(),
        "there is nothing to do: no {} is among --shapes {shapes}",
        named()
    );
    Ok(layers)
}

/// The op of a `--ops` word.
pub fn parse_op(word: &str) -> Result<OpKind, String> {
    let name = word.replace('-', "_");
    let named = OpKind::ALL.into_iter().find(|op| op.name() == name);
    named.ok_or_else(|| format!("{word:?} is none of ag_gemm, gemm_rs and gemm_ar"))
}

/// What people call the usual type of 8-bit operands.
const FP8: (&str, DType) = ("fp8", DType::E4m3);

/// The element type of a `--dtype` word.
pub(crate) fn parse_dtype(word: &str) -> Result<DType, String> {
    let names = DType::ALL.map(|dtype| (dtype.name(), dtype)).into_iter();
    let mut words = names.chain([("f16", DType::F16), FP8]);
    words.find(|(name, _)| *name == word).map(|(_, dtype)| dtype).ok_or_else(|| {
        let known = DType::OUTPUTS.map(DType::name).into_iter().chain([FP8.0]);
        format!("{word:?} is none of {}", flux_core::words::list(known, "and"))
    })
}

/// The form of a `--scales` word.
fn parse_scales(word: &str) -> Result<Scales, String> {
    let named = Scales::OF_QUANTIZED.into_iter().find(|scales| scales.name() == word);
    named.ok_or_else(|| {
        format!("{word:?} is none of {}", flux_core::words::list(Scales::OF_QUANTIZED, "and"))
    })
}

/// The type of a `--partials` word.
pub(crate) fn parse_partials(word: &str) -> Result<Partials, String> {
    match word {
        "dtype" => Ok(Partials::Output),
        "f32" | "fp32" => Ok(Partials::F32),
        _ => Err(format!("{word:?} is neither dtype nor f32")),
    }
}

/// The world of a `--tp` word.
///
/// # Errors
/// No world has so many ranks.
pub fn world(tp: u32) -> anyhow::Result<WorldSize> {
    world_of("--tp", tp)
}

/// The world of so many ranks, as this option gives them.
///
/// # Errors
/// As [`world`].
pub(crate) fn world_of(option: &str, ranks: u32) -> anyhow::Result<WorldSize> {
    WorldSize::new(ranks)
        .with_context(|| format!("{option} {ranks} is outside 1 to {}", flux_core::rank::MAX_WORLD))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        args: LayerArgs,
    }

    fn given(words: &str, on_gpus: bool) -> anyhow::Result<Vec<Layer>> {
        let line = Line::parse_from(["x"].into_iter().chain(words.split_whitespace()));
        line.args.layers(world(2).unwrap(), on_gpus, &[64, 128])
    }

    #[test]
    fn layers_that_are_left_out_suit_the_machine() {
        let names = |words: &str, on_gpus| {
            let layers = given(words, on_gpus).unwrap();
            layers
                .iter()
                .map(|layer| format!("{} {}", layer.name, layer.problem.m()))
                .collect::<Vec<_>>()
                .join(", ")
        };
        assert_eq!(names("--ops ag_gemm", true), "gpt3 64, gpt3 128, llama70b 64, llama70b 128");
        assert_eq!(names("--ops ag_gemm", false), "gpt3/16 512, llama70b/16 512");
        assert_eq!(
            names("--shapes gpt3/128 --ms 16", false),
            "gpt3/128 16, gpt3/128 16",
            "both ops"
        );
        assert_eq!(
            names("--shapes gemm_rs:n=8,k=16,64x128 --ms 16 --ops gemm_rs", false),
            "gemm_rs:n=8,k=16 16, 64x128 16"
        );
    }

    #[test]
    fn shapes_without_the_op_or_that_ranks_cannot_split_are_named() {
        let error = |words: &str| format!("{:#}", given(words, true).unwrap_err());
        assert_eq!(
            error("--shapes llama3-8b.qkv --ops gemm_rs"),
            "there is nothing to do: no gemm_rs is among --shapes llama3-8b.qkv"
        );
        let uneven = given("--shapes 64x128 --ms 17", true).unwrap();
        let error = ensure_equal_shards(&uneven).unwrap_err().to_string();
        assert_eq!(error.matches("m = 17").count(), 1, "{error}");
        assert!(error.starts_with("ag_gemm of 64x128: m = 17 "), "{error}");
    }

    #[test]
    fn a_type_has_the_name_that_reports_give_it() {
        for dtype in DType::ALL {
            assert_eq!(parse_dtype(dtype.name()), Ok(dtype));
        }
        assert_eq!(["f16", "fp8"].map(parse_dtype), [Ok(DType::F16), Ok(DType::E4m3)]);
        assert_eq!(parse_dtype("f32"), Err("\"f32\" is none of bf16, fp16 and fp8".to_owned()));
    }

    #[test]
    fn scales_are_of_8_bit_operands() {
        let given = |words: &str| {
            let words = ["x"].into_iter().chain(words.split_whitespace());
            Line::try_parse_from(words).map(|line| line.args.types.numerics())
        };
        let text = |words| given(words).unwrap().unwrap().to_string();
        assert_eq!(text(""), "bf16");
        assert_eq!(text("--dtype fp8"), "e4m3.row:bf16");
        assert_eq!(text("--dtype fp8 --scales block"), "e4m3.block:bf16");
        assert_eq!(
            text("--dtype fp8 --scales tensor --fast-accumulation"),
            "e4m3.tensor.fast:bf16"
        );
        for (words, why) in [
            ("--scales row", "--scales and --fast-accumulation are of --dtype fp8, and it is bf16"),
            ("--dtype fp16 --fast-accumulation", "and it is fp16"),
            ("--dtype fp8 --scales block --fast-accumulation", "every block"),
        ] {
            let error = given(words).unwrap().unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
        assert!(given("--dtype fp8 --scales none").is_err());
    }

    #[test]
    fn sums_alone_have_partials_in_fp32() {
        let [f32, dtype] = ["f32", "dtype"].map(|word| parse_partials(word).unwrap());
        assert_eq!(parse_partials("bf16"), Err("\"bf16\" is neither dtype nor f32".to_owned()));
        let sums = || given("--shapes 64x128 --ms 16 --ops gemm_rs,gemm_ar", true).unwrap();
        let with = with_partials(sums(), f32).unwrap();
        assert!(
            with.iter().all(|layer| layer.name == "64x128+f32"
                && layer.problem.numerics().partials == f32)
        );
        assert_eq!(with_partials(sums(), dtype).unwrap(), sums());
        let error = with_partials(given("--shapes 64x128 --ms 16", true).unwrap(), f32)
            .unwrap_err()
            .to_string();
        assert_eq!(error, "--partials f32 is of gemm_rs and gemm_ar: name them with --ops");
    }

    /// No operand has an element above 1, so no sum of products is above `k`, and random ones have
    /// a standard deviation of at most `sqrt(k) / 3`.
    #[test]
    fn no_sum_of_any_layer_is_more_than_fp16_holds() {
        // Of 16 ranks' partial sums each is rounded, and each sum of them.
        let roundings = (1.0 + DType::F16.unit_roundoff()).powi(32);
        for (name, gemms) in models::named() {
            let longest = gemms.iter().map(|gemm| gemm.k).max().unwrap() as f64;
            assert!(longest * roundings < half::f16::MAX.to_f64(), "{name}");
            let deviation = longest.sqrt() / 3.0;
            assert!(
                100.0 * 8.0 * deviation < half::f16::MAX.to_f64(),
                "{name}: eight deviations are above a hundredth of it"
            );
        }
    }
}
