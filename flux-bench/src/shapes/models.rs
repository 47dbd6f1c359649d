//! The layers that have names.
//!
//! Invariant: extents are those of the published configuration, of the whole model.

use super::Gemm;
use flux_core::OpKind::{AllGatherGemm, GemmReduceScatter};

/// A model's linear layers, by global extents.
struct Model {
    name: &'static str,
    hidden: usize,
    /// Inner extent of the MLP.
    ffn: usize,
    /// Whether its column-parallel layer has a gate for each of them.
    gated: bool,
    /// Heads of 128, and key-value heads.
    heads: [usize; 2],
    /// Column-parallel projections of multi-head latent attention: name, `n`, `k`.
    mla: &'static [(&'static str, usize, usize)],
}

const HEAD: usize = 128;

const MODELS: [Model; 6] = [
    // Brown et al., "Language models are few-shot learners", table 2.1.
    Model { name: "gpt3", hidden: 12288, ffn: 49152, gated: false, heads: [96, 96], mla: &[] },
    // config.json of meta-llama/Llama-2-70b-hf. Its ups alone, which FLUX's authors measure (arXiv
    // 2406.06858), and all records.
    Model { name: "llama70b", hidden: 8192, ffn: 28672, gated: false, heads: [64, 8], mla: &[] },
    // config.json of meta-llama/Meta-Llama-3-8B.
    Model { name: "llama3-8b", hidden: 4096, ffn: 14336, gated: true, heads: [32, 8], mla: &[] },
    // config.json of meta-llama/Meta-Llama-3-70B.
    Model { name: "llama3-70b", hidden: 8192, ffn: 28672, gated: true, heads: [64, 8], mla: &[] },
    // config.json of Qwen/Qwen3-32B.
    Model { name: "qwen3-32b", hidden: 5120, ffn: 25600, gated: true, heads: [64, 8], mla: &[] },
    // config.json of deepseek-ai/DeepSeek-V3, of its dense layers. Attention projects down to ranks
    // 1536 and 512 on every rank. It projects up column-parallel: 128 + 64 of a head for queries,
    // and 128 + 128 for keys and values.
    Model {
        name: "deepseek-v3",
        hidden: 7168,
        ffn: 18432,
        gated: true,
        heads: [128, 128],
        mla: &[("q_b", 128 * (HEAD + 64), 1536), ("kv_b", 128 * (HEAD + HEAD), 512)],
    },
];

/// Every name with its GEMMs: `MODEL` for the MLP, `MODEL.o` and the like for projections.
pub(super) fn named() -> impl Iterator<Item = (String, Vec<Gemm>)> {
    MODELS.iter().flat_map(|&Model { name, hidden, ffn, gated, heads, mla }| {
        let of = |part: &str, op, n, k| (format!("{name}.{part}"), vec![Gemm { op, n, k }]);
        let mlp = vec![
            Gemm { op: AllGatherGemm, n: if gated { 2 * ffn } else { ffn }, k: hidden },
            Gemm { op: GemmReduceScatter, n: hidden, k: ffn },
        ];
        let qkv = [("qkv", (heads[0] + 2 * heads[1]) * HEAD, hidden)];
        let projections = if mla.is_empty() { &qkv } else { mla };
        let up = projections.iter().map(|&(part, n, k)| of(part, AllGatherGemm, n, k));
        std::iter::once((name.to_owned(), mlp))
            .chain(up)
            .chain([of("o", GemmReduceScatter, hidden, heads[0] * HEAD)])
            .collect::<Vec<_>>()
    })
}
