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
    /// Column-parallel projections of the attention: name, `n`, `k`.
    projections: &'static [(&'static str, usize, usize)],
    /// Heads times the extent of a head's value: what the output projection reads.
    values: usize,
}

/// The `n` of a fused query, key and value projection with `kv` key-value heads.
const fn qkv(heads: usize, kv: usize, head: usize) -> usize {
    (heads + 2 * kv) * head
}

const MODELS: [Model; 6] = [
    // Brown et al., "Language models are few-shot learners", table 2.1: 96 heads of 128.
    Model {
        name: "gpt3",
        hidden: 12288,
        ffn: 49152,
        gated: false,
        projections: &[("qkv", qkv(96, 96, 128), 12288)],
        values: 96 * 128,
    },
    // config.json of meta-llama/Llama-2-70b-hf: 64 heads, 8 key-value heads.
    Model {
        name: "llama70b",
        hidden: 8192,
        ffn: 28672,
        // Its ups alone, which FLUX's authors measure (arXiv 2406.06858), and all records.
        gated: false,
        projections: &[("qkv", qkv(64, 8, 128), 8192)],
        values: 64 * 128,
    },
    // config.json of meta-llama/Meta-Llama-3-8B: 32 heads, 8 key-value heads.
    Model {
        name: "llama3-8b",
        hidden: 4096,
        ffn: 14336,
        gated: true,
        projections: &[("qkv", qkv(32, 8, 128), 4096)],
        values: 32 * 128,
    },
    // config.json of meta-llama/Meta-Llama-3-70B: 64 heads, 8 key-value heads.
    Model {
        name: "llama3-70b",
        hidden: 8192,
        ffn: 28672,
        gated: true,
        projections: &[("qkv", qkv(64, 8, 128), 8192)],
        values: 64 * 128,
    },
    // config.json of Qwen/Qwen3-32B: 64 heads of 128, 8 key-value heads.
    Model {
        name: "qwen3-32b",
        hidden: 5120,
        ffn: 25600,
        gated: true,
        projections: &[("qkv", qkv(64, 8, 128), 5120)],
        values: 64 * 128,
    },
    // config.json of deepseek-ai/DeepSeek-V3, of its dense layers. Attention projects down to ranks
    // 1536 and 512 on every rank. It projects up column-parallel: 128 heads of 128 + 64 for
    // queries, and of 128 + 128 for keys and values.
    Model {
        name: "deepseek-v3",
        hidden: 7168,
        ffn: 18432,
        gated: true,
        projections: &[("q_b", 128 * (128 + 64), 1536), ("kv_b", 128 * (128 + 128), 512)],
        values: 128 * 128,
    },
];

/// Every name with its GEMMs: `MODEL` for the MLP, `MODEL.o` and the like for projections.
pub(super) fn named() -> impl Iterator<Item = (String, Vec<Gemm>)> {
    MODELS.iter().flat_map(|&Model { name, hidden, ffn, gated, projections, values }| {
        let of = |part: &str, op, n, k| (format!("{name}.{part}"), vec![Gemm { op, n, k }]);
        let mlp = vec![
            Gemm { op: AllGatherGemm, n: if gated { 2 * ffn } else { ffn }, k: hidden },
            Gemm { op: GemmReduceScatter, n: hidden, k: ffn },
        ];
        let up = projections.iter().map(move |&(part, n, k)| of(part, AllGatherGemm, n, k));
        std::iter::once((name.to_owned(), mlp))
            .chain(up)
            .chain([of("o", GemmReduceScatter, hidden, values)])
            .collect::<Vec<_>>()
    })
}
