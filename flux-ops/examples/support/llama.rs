//! A small Llama layer on the host in fp64, whole and by parts.

/// Features of a token.
pub(crate) const HIDDEN: usize = 64;
/// Features of a rank's head.
pub(crate) const HEAD: usize = 16;
/// Features of a rank's part of the MLP.
pub(crate) const INNER: usize = 32;
/// Added to the mean of squares.
pub(crate) const EPS: f32 = 1e-5;

/// Keys and values of a sequence.
#[derive(Clone, Debug, Default)]
pub(crate) struct Cache(Vec<([f64; HEAD], [f64; HEAD])>);

/// Attention of each row over its sequence, which it joins.
pub(crate) fn attention(qkv: &[f64], caches: &mut [Cache]) -> Vec<f64> {
    let each = qkv.chunks_exact(3 * HEAD).zip(caches).flat_map(|(row, Cache(tokens))| {
        let part = |n: usize| std::array::from_fn(|i| row[n * HEAD + i]);
        tokens.push((part(1), part(2)));
        let score = |key: &[f64; HEAD]| {
            (row.iter().zip(key).map(|(q, k)| q * k).sum::<f64>() / (HEAD as f64).sqrt()).exp()
        };
        let scores: Vec<f64> = tokens.iter().map(|(key, _)| score(key)).collect();
        let total: f64 = scores.iter().sum();
        (0..HEAD)
            .map(|i| {
                tokens.iter().zip(&scores).map(|((_, value), s)| value[i] * s / total).sum::<f64>()
            })
            .collect::<Vec<_>>()
    });
    each.collect()
}

/// `silu(gate) * up` of each row.
pub(crate) fn swiglu(up: &[f64]) -> Vec<f64> {
    up.chunks_exact(2 * INNER)
        .flat_map(|row| (0..INNER).map(|i| row[i] / (1.0 + (-row[i]).exp()) * row[INNER + i]))
        .collect()
}

/// RMSNorm of each row, without gain.
pub(crate) fn normalised(rows: &[f64]) -> Vec<f64> {
    let norm = |row: &[f64]| {
        (row.iter().map(|v| v * v).sum::<f64>() / HIDDEN as f64 + f64::from(EPS)).sqrt()
    };
    rows.chunks_exact(HIDDEN)
        .flat_map(|row| row.iter().map(|v| v / norm(row)).collect::<Vec<_>>())
        .collect()
}

/// The same layer in fp64, of all ranks; `caches` by rank.
pub(crate) fn layer(tokens: &[f64], caches: &mut [Vec<Cache>]) -> Vec<f64> {
    let ranks = caches.len();
    let mut hidden = tokens.to_vec();
    let mut add = |which, k, parts: &[Vec<f64>]| {
        for (rank, part) in parts.iter().enumerate() {
            let sum = product(part, &matrix(which, rank, HIDDEN, k), k);
            hidden.iter_mut().zip(sum).for_each(|(hidden, sum)| *hidden += sum);
        }
        normalised(&hidden)
    };
    let of_rows = |rows: &[f64], which, n| {
        (0..ranks)
            .map(move |rank| product(rows, &matrix(which, rank, n, HIDDEN), HIDDEN))
            .collect::<Vec<_>>()
    };
    let heads: Vec<_> = of_rows(&normalised(tokens), 0, 3 * HEAD)
        .iter()
        .zip(caches)
        .map(|(qkv, caches)| attention(qkv, caches))
        .collect();
    let rows = add(1, HEAD, &heads);
    let gated: Vec<_> = of_rows(&rows, 2, 2 * INNER).iter().map(|up| swiglu(up)).collect();
    add(3, INNER, &gated);
    hidden
}

/// `x w^T` with rows of `k`.
fn product(x: &[f64], w: &[f64], k: usize) -> Vec<f64> {
    x.chunks_exact(k)
        .flat_map(|x| w.chunks_exact(k).map(move |w| x.iter().zip(w).map(|(x, w)| x * w).sum()))
        .collect()
}

/// A rank's part of a tensor: elements between -0.25 and 0.25, exact in bf16.
pub(crate) fn matrix(which: usize, rank: usize, rows: usize, cols: usize) -> Vec<f64> {
    (0..rows * cols)
        .map(|i| {
            ((i / cols * 37 + i % cols * 101 + which * 53 + rank * 29 + i / cols * (i % cols) * 7)
                % 129) as f64
                / 256.0
                - 0.25
        })
        .collect()
}
