/* flux: fused tensor-parallel GEMM layers. docs/c.md has a guide.
 *
 * Made by cbindgen from the crate flux-c: change that, not this file.
 *
 * A function that fails leaves a message: flux_last_error_message. Pointers are to memory of the
 * caller's, which the library uses until the function returns unless a comment says more. Threads
 * may call functions at the same time; a handle is destroyed when no other thread uses it. */

#ifndef FLUX_H
#define FLUX_H

#include <stddef.h>
#include <stdint.h>

// The version of this interface. It changes with any structure: use the header of the library's
// own build.
#define FLUX_ABI_VERSION 3

// Calls add a bias.
#define FLUX_OP_BIAS 1

// Calls add a residual before the one rounding. Not of FLUX_ALL_GATHER_GEMM.
#define FLUX_OP_RESIDUAL 2

// Calls also write the normalised rows of `y`: y / sqrt(mean(y^2) + eps) * gain. Not of
// FLUX_ALL_GATHER_GEMM.
#define FLUX_OP_RMS_NORM 4

// Calls may be captured in CUDA graphs. Such graphs are destroyed before the communicator, and the
// operands of their calls stay where they are until then.
#define FLUX_OP_CAPTURES 8

// The weight is stored as `[k, n]`, of this rank's extents, in place of `[n, k]`.
#define FLUX_OP_WEIGHTS_KN 16

// A row of the result has the same bits whatever rows share its call. They then depend on the
// row's values, the weights, `n`, `k`, the number of ranks and the element type alone.
#define FLUX_OP_BATCH_INVARIANT 32

// Ranks send partial sums in fp32, in place of the result's type: the result is rounded once, and
// twice the bytes of partial sums are sent. Not of FLUX_ALL_GATHER_GEMM.
#define FLUX_OP_F32_PARTIALS 64

// With FLUX_E4M3 and scales of tensors or rows: tensor cores add all products, and keep fewer bits
// of sums than fp32. Sums leave them every 128 elements of `k` otherwise.
#define FLUX_OP_FAST_ACCUMULATION 128

// Most weights of an op.
#define FLUX_MAX_WEIGHTS 4

// What a function returns. After all but FLUX_OK, flux_last_error_message() of the same thread
// says what happened and what to do.
enum flux_status
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    // Done, or, of a call on a CUDA stream, on its way.
    FLUX_OK = 0,
    // An argument cannot be used: a null pointer, an unknown number, a structure of another size.
    FLUX_ERROR_ARGUMENT = 1,
    // A handle is null, foreign, destroyed, of another process, or still in use.
    FLUX_ERROR_HANDLE = 2,
    // An operand, extent or option does not fit. Nothing was launched; make a good call.
    FLUX_ERROR_OPERAND = 3,
    // The ranks did not become a communicator.
    FLUX_ERROR_CONNECT = 4,
    // The op, or the program of a call, could not be built. Of an op all ranks have left the
    // build, and the communicator works.
    FLUX_ERROR_BUILD = 5,
    // Ranks build different ops, after which the communicator works; or they make different calls,
    // after which it is broken.
    FLUX_ERROR_DISAGREED = 6,
    // A peer's process or thread is gone. The communicator is broken.
    FLUX_ERROR_PEER_LOST = 7,
    // A peer has destroyed its communicator before this call. This rank's is broken.
    FLUX_ERROR_PEER_LEFT = 8,
    // A peer did not come in time. The communicator is broken.
    FLUX_ERROR_TIMEOUT = 9,
    // A peer has given the communicator up. It is broken.
    FLUX_ERROR_ABORTED = 10,
    // The driver, NCCL or the operating system refused something.
    FLUX_ERROR_SYSTEM = 11,
    // A defect of the library. Standard error has more; destroy the communicator.
    FLUX_ERROR_PANIC = 12,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum flux_status flux_status;
#else
typedef int32_t flux_status;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// Element types of operands. Products are added in fp32. Partial sums travel between ranks in the
// type of `y`, or in fp32 with FLUX_OP_F32_PARTIALS.
enum flux_dtype
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    // bfloat16.
    FLUX_BF16 = 1,
    // IEEE half precision.
    FLUX_FP16 = 2,
    // 8 bits, E4M3, 448 at most: of `x` and `w`, which have scales, and of normalised rows. On a
    // GPU of compute capability 8.9 or later.
    FLUX_E4M3 = 3,
    // IEEE single precision: of scales alone.
    FLUX_FP32 = 4,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum flux_dtype flux_dtype;
#else
typedef int32_t flux_dtype;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// The fp32 factors of operands of FLUX_E4M3: an element is its code times its scale. Extents are
// those of a rank's `x` and `w[n, k]`.
enum flux_scales
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    // None.
    FLUX_SCALES_NONE = 0,
    // scale_x[1, 1], the same on all ranks that gather `x`, and scale_w[1, 1].
    FLUX_SCALES_TENSOR = 1,
    // One of each row: scale_x[rows, 1], scale_w[1, n].
    FLUX_SCALES_ROW = 2,
    // One of each 1 x 128 of `x` and 128 x 128 of `w`: scale_x[rows, k/128],
    // scale_w[n/128, k/128].
    FLUX_SCALES_BLOCK = 3,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum flux_scales flux_scales;
#else
typedef int32_t flux_scales;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// The kinds of ops. Extents `m`, `n` and `k` are global, and rank `r` has `m_r` rows:
// flux_op_rows. It has `n_r` columns or `k_r` elements of the inner extent: flux_op_columns,
// flux_op_inner.
enum flux_op_kind
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    // Column-parallel: x[m_r, k], w[n_r, k], y[m, n_r] = act(gather(x) * w^T + bias).
    FLUX_ALL_GATHER_GEMM = 1,
    // Row-parallel: x[m, k_r], w[n, k_r], y[m_r, n] = scatter(sum of x * w^T) + bias + residual.
    FLUX_GEMM_REDUCE_SCATTER = 2,
    // Row-parallel: x[m, k_r], w[n, k_r], y[m, n] = sum of x * w^T + bias + residual, the same
    // bits on every rank.
    FLUX_GEMM_ALL_REDUCE = 3,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum flux_op_kind flux_op_kind;
#else
typedef int32_t flux_op_kind;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// Activations of FLUX_ALL_GATHER_GEMM.
//
// Those with gates multiply an activated gate by its up, and `y` has n_r/2 columns. Of the n_r
// rows of a rank's weight, and of its bias, half are gates and half are ups. Gates come first, or
// with INTERLEAVED each before its up. n_r is then a multiple of 16, and FLUX_OP_WEIGHTS_KN is
// refused.
enum flux_activation
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    // None.
    FLUX_ACTIVATION_NONE = 0,
    // GELU in its tanh form.
    FLUX_ACTIVATION_GELU = 1,
    // v / (1 + exp(-v)).
    FLUX_ACTIVATION_SILU = 2,
    // max(v, 0).
    FLUX_ACTIVATION_RELU = 3,
    // GELU of gates.
    FLUX_ACTIVATION_GEGLU = 4,
    // SiLU of gates.
    FLUX_ACTIVATION_SWIGLU = 5,
    // ReLU of gates.
    FLUX_ACTIVATION_REGLU = 6,
    // GELU of gates, each before its up.
    FLUX_ACTIVATION_GEGLU_INTERLEAVED = 7,
    // SiLU of gates, each before its up.
    FLUX_ACTIVATION_SWIGLU_INTERLEAVED = 8,
    // ReLU of gates, each before its up.
    FLUX_ACTIVATION_REGLU_INTERLEAVED = 9,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum flux_activation flux_activation;
#else
typedef int32_t flux_activation;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// Who takes part in a communicator that is rebuilt.
enum flux_rebuild
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    // The ranks that are neither lost nor given up, renumbered in order. On one host only.
    FLUX_REBUILD_SURVIVORS = 1,
    // All ranks under their numbers: a new process with the same variables replaces each lost one.
    FLUX_REBUILD_WHOLE = 2,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum flux_rebuild flux_rebuild;
#else
typedef int32_t flux_rebuild;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// One rank's membership of a group of ranks that compute together.
typedef struct flux_comm flux_comm;

// One rank's part of a fused linear layer. It holds no weights: one op serves every layer with its
// options.
typedef struct flux_op flux_op;

// How to connect. Zeros are the defaults. All ranks give the same but for the device.
typedef struct flux_comm_options {
    // sizeof(flux_comm_options).
    size_t size;
    // "host", "nvlink", "pcie", "nccl", "mixed" or "auto": what FLUX_TRANSPORT names, else the
    // best that works. NULL for "auto".
    const char *transport;
    // Seconds that a wait for a peer may take, at most 24 hours; 0 for 30.
    double timeout;
    // Most bytes of the workspace that the ranks share: an op that needs more is refused. 0 for no
    // limit.
    uint64_t max_workspace;
    // SMs that calls leave to other kernels.
    uint32_t sm_margin;
    // 0: the CUDA device is the rank's number on its host. 1: it is `device`.
    uint32_t has_device;
    // The number of the CUDA device in this process.
    uint32_t device;
    // 0.
    uint32_t reserved;
} flux_comm_options;

// What an op is created for; the same on every rank.
typedef struct flux_op_options {
    // sizeof(flux_op_options).
    size_t size;
    // A flux_op_kind.
    int32_t kind;
    // A flux_dtype: of `x` and `w`.
    int32_t dtype;
    // Most rows of a call, of all ranks together.
    size_t max_m;
    // Output features of all ranks together, a multiple of 8, with gates of 16; of FLUX_E4M3 twice
    // as many, with FLUX_SCALES_BLOCK of 128 and 256. Of FLUX_ALL_GATHER_GEMM at least as many for
    // each rank.
    size_t n;
    // Inner features of all ranks together, a multiple of 8, of FLUX_E4M3 of 16, with
    // FLUX_SCALES_BLOCK of 128. Of others than FLUX_ALL_GATHER_GEMM at least as many for each
    // rank.
    size_t k;
    // Of FLUX_ALL_GATHER_GEMM with several weights, such as queries, keys and values, which share
    // the gathered rows: the columns of each, `n` in all, then zeros. Zeros for one weight. Ranks
    // split each weight on its own: flux_op_weight_columns. Gates and FLUX_OP_WEIGHTS_KN are
    // refused.
    size_t columns[FLUX_MAX_WEIGHTS];
    // FLUX_OP_BIAS and others, or 0.
    uint32_t flags;
    // A flux_activation.
    int32_t activation;
    // The eps of FLUX_OP_RMS_NORM; else 0.
    float rms_norm_eps;
    // A flux_scales, of FLUX_E4M3; else 0.
    int32_t scales;
    // A flux_dtype, of FLUX_E4M3: that of `y` and of what is added to it. Else 0, for `dtype`.
    int32_t output;
    // A flux_scales, with FLUX_OP_RMS_NORM: those of `y_norm`, which then is FLUX_E4M3, ready to
    // be `x` of the next op. `n` is a multiple of 16, with FLUX_SCALES_BLOCK of 128, and a GPU has
    // compute capability 8.9 or later. Else 0, for a `y_norm` of the type of `y`.
    int32_t norm_scales;
} flux_op_options;

// A row-major matrix of the caller's. A vector is one row.
typedef struct flux_tensor {
    // Address of the first element: a multiple of 16, of FLUX_FP32 of 4. NULL is possible without
    // rows.
    void *data;
    // Rows.
    size_t rows;
    // Columns: consecutive elements of a row.
    size_t cols;
    // Elements from a row to the next, in bytes a multiple of 16, of FLUX_FP32 of 4; 0 for `cols`.
    size_t row_stride;
    // A flux_dtype.
    int32_t dtype;
} flux_tensor;

// The operands of one call on one rank. NULL for those that the op was created without. Memory
// between rows is not touched, and outputs share no memory with other operands.
typedef struct flux_operands {
    // sizeof(flux_operands).
    size_t size;
    // Input: see flux_op_kind.
    const struct flux_tensor *x;
    // Weight: see flux_op_kind. Of an op with several weights `w`, `scale_w`, `bias` and `y` are
    // arrays, with an element for each weight.
    const struct flux_tensor *w;
    // With scales: of FLUX_FP32, see flux_scales. Of FLUX_ALL_GATHER_GEMM scales of rows and of
    // blocks lie behind the `k` elements of each row of `x`, which travel with them. Each row has
    // memory up to a multiple of 128 bytes, all of which is read.
    const struct flux_tensor *scale_x;
    // With scales: of FLUX_FP32, see flux_scales.
    const struct flux_tensor *scale_w;
    // With FLUX_OP_BIAS: one row, a value for each column of `y`; with gates `n_r` values, one for
    // each of this rank's rows of the weight `[n, k]`.
    const struct flux_tensor *bias;
    // With FLUX_OP_RESIDUAL: of the shape of `y`, and it may be the memory of `y`.
    const struct flux_tensor *residual;
    // With FLUX_OP_RMS_NORM: one row, a factor for each column of `y`.
    const struct flux_tensor *gain;
    // With norm_scales of FLUX_SCALES_TENSOR: the scale of `y_norm`, [1, 1] of FLUX_FP32.
    const struct flux_tensor *norm_scale;
    // The result, which is overwritten: see flux_op_kind.
    const struct flux_tensor *y;
    // With FLUX_OP_RMS_NORM: the normalised rows, of the shape of `y`; overwritten. With
    // norm_scales of rows or blocks the scales lie behind the `n` codes of each row, which has a
    // column for each byte of both, up to a multiple of 128.
    const struct flux_tensor *y_norm;
    // With norm_scales of rows or blocks: where they go, in place of behind the rows of `y_norm`;
    // or NULL. Of FLUX_FP32, overwritten: [1, rows] or [n/128, rows], with a column where there
    // are no rows.
    const struct flux_tensor *y_norm_scale;
    // Of FLUX_ALL_GATHER_GEMM: where all rows of `x` go, [m, k], overwritten; or NULL.
    const struct flux_tensor *x_full;
    // Elements of `w`, `scale_w`, `bias` and `y`: those of the op's columns. 0 for one.
    size_t weight_count;
    // 1 where the weights are there before the work ahead of the call on its stream begins, else 0.
    // On Hopper the call then loads the first of them while the kernel ahead ends. Whoever changes
    // weights waits for the device before the next call of this kind.
    size_t constant_weights;
} flux_operands;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// The version of the library: compare it with FLUX_ABI_VERSION of the header.
uint32_t flux_abi_version(void);

// Connects the ranks of a launcher: torchrun, srun, mpirun or `flux-bench launch`. Collective:
// waits for the other processes, at least a minute.
//
// options   NULL for the defaults
// comm      gets the communicator, or NULL
flux_status flux_comm_from_env(const struct flux_comm_options *options, struct flux_comm **comm);

// Connects processes that know their ranks. Collective: waits for the others, at least a minute.
//
// rank        this rank, from 0.
// world_size  number of ranks, at most 16.
// meeting     "HOST:PORT", an address and a free port of rank 0's host; or, of ranks on one host,
//             an existing directory: absolute path, mode 0700, of this user, of no other launch.
// secret      with an address: 16 to 4096 bytes that all ranks know and nobody else; else NULL.
// secret_size bytes of it.
// options     NULL for the defaults
// comm        gets the communicator, or NULL
flux_status flux_comm_init_rank(uint32_t rank,
                                uint32_t world_size,
                                const char *meeting,
                                const void *secret,
                                size_t secret_size,
                                const struct flux_comm_options *options,
                                struct flux_comm **comm);

// Makes all ranks in this process, each for a thread of its own. On GPUs rank `r` has device `r`.
//
// world_size  number of ranks, at most 16; nothing is written where it is another
// options     NULL for the defaults; without a device
// comms       gets `world_size` communicators by rank, or as many NULL
flux_status flux_comm_init_all(uint32_t world_size,
                               const struct flux_comm_options *options,
                               struct flux_comm **comms);

// Leaves the group, when this rank's calls have ended. Destroy its ops before, and CUDA graphs
// with calls of them. Peers finish the calls that this rank has made; their later ones fail.
flux_status flux_comm_destroy(struct flux_comm *comm);

// Makes a new communicator of a broken one. Collective among those that go on. The old one stays
// broken: destroy its ops and it, and create the ops anew.
//
// who       a flux_rebuild, the same on all of them
// rebuilt   gets the new communicator, or NULL
flux_status flux_comm_rebuild(const struct flux_comm *comm,
                              int32_t who,
                              struct flux_comm **rebuilt);

// Who this rank is. Any of the places may be NULL.
//
// rank        gets its number
// world_size  gets the number of ranks
// device      gets the number of its CUDA device in this process; -1 where it works on the host
flux_status flux_comm_place(const struct flux_comm *comm,
                            uint32_t *rank,
                            uint32_t *world_size,
                            int32_t *device);

// Whether calls may be captured in CUDA graphs: 1 or 0.
flux_status flux_comm_graphs(const struct flux_comm *comm, int32_t *graphs);

// Bytes that this rank's communicator and its ops hold. Any of the places may be NULL.
flux_status flux_comm_memory(const struct flux_comm *comm,
                             uint64_t *device,
                             uint64_t *pinned,
                             uint64_t *host);

// The transport and why it was chosen, for people.
//
// text      gets the text and a NUL, cut to `capacity` bytes; NULL where that is 0
// needed    gets the bytes of all of it with the NUL; or NULL
flux_status flux_comm_explain(const struct flux_comm *comm,
                              char *text,
                              size_t capacity,
                              size_t *needed);

// Returns the fault that broke the communicator, or FLUX_OK. Waits for no call. The first to find
// a fault asks the peers what they do, for some 0.25 s at most. On CUDA, a result may be read when
// its stream has come past the call and this then returns FLUX_OK.
flux_status flux_comm_check(const struct flux_comm *comm);

// Returns when every rank has come here, on the host only. Collective.
flux_status flux_comm_barrier(const struct flux_comm *comm);

// Ends every wait of the communicator on all ranks, and breaks it: for a rank that cannot make a
// call that its peers are in, and to end a call that another thread of this rank waits in, for
// example after SIGINT. Those calls return FLUX_ERROR_ABORTED. Any thread may call it at any time
// while the handle lives, but no signal handler: it takes locks and sends messages.
//
// reason    a number of the caller's
flux_status flux_comm_abort(const struct flux_comm *comm, uint32_t reason);

// What the last function of this thread that did not return FLUX_OK says: what happened, and what
// to do. Empty before the first. UTF-8; it stays until the next such function of the thread, and
// the caller does not free it.
const char *flux_last_error_message(void);

// The ranks at fault of the same error: the lost or late ones, or those that differ.
//
// ranks     gets the first `capacity` of their numbers; NULL where that is 0
//
// Returns how many there are; 0 where the error names none.
size_t flux_last_error_ranks(uint32_t *ranks, size_t capacity);

// Creates an op. Collective: every rank creates the same ops in the same order, and no other
// thread of this rank is in a call. Waits for the others; on CUDA compiles kernels that the cache
// lacks. Create all ops before the first capture, as a larger workspace moves.
//
// op        gets the op, or NULL
flux_status flux_op_create(const struct flux_comm *comm,
                           const struct flux_op_options *options,
                           struct flux_op **op);

// Destroys an op. Not collective; calls on a stream still end.
flux_status flux_op_destroy(struct flux_op *op);

// Makes the programs of these numbers of rows and keeps them, for calls that are captured later.
// Not collective. Waits for this rank's calls.
//
// rows      `count` values of `m`
// count     at most max_m + 1, as many values as `m` can have
flux_status flux_op_prepare(const struct flux_op *op, const size_t *rows, size_t count);

// The rows of a rank's shard, of calls with `m` rows: the first m % W ranks have one more.
//
// first     gets the first row; or NULL
// count     gets the number of rows; or NULL
flux_status flux_op_rows(const struct flux_op *op,
                         size_t m,
                         uint32_t rank,
                         size_t *first,
                         size_t *count);

// The columns of all `n` that a rank has: the rows of its `w`, and the columns of its `y`, of
// which it has half with gates. All but of FLUX_ALL_GATHER_GEMM. There `n` is split in groups of
// 8 columns; with FLUX_E4M3 of 16, with scales of blocks of 128. Gates double the group. The first
// ranks may have a group more. Of several weights those of the first.
//
// first     gets the first column; or NULL
// count     gets the number of columns; or NULL
flux_status flux_op_columns(const struct flux_op *op, uint32_t rank, size_t *first, size_t *count);

// As flux_op_columns, of one of several weights, counted from its own first column.
//
// weight    its index in the op's columns
// first     gets the first column; or NULL
// count     gets the number of columns; or NULL
flux_status flux_op_weight_columns(const struct flux_op *op,
                                   size_t weight,
                                   uint32_t rank,
                                   size_t *first,
                                   size_t *count);

// The elements of the inner extent `k` that a rank has: the columns of its `x` and `w`. All of
// FLUX_ALL_GATHER_GEMM. Of others they are split in groups of 8, of FLUX_E4M3 of 16, with scales
// of blocks of 128. The first ranks may have a group more.
//
// first     gets the first element; or NULL
// count     gets the number of elements; or NULL
flux_status flux_op_inner(const struct flux_op *op, uint32_t rank, size_t *first, size_t *count);

// How calls are executed, for people. The places are those of flux_comm_explain.
flux_status flux_op_explain(const struct flux_op *op, char *text, size_t capacity, size_t *needed);

// Computes `y` from operands in host memory, on a communicator of the host transport. Collective:
// every rank makes the same calls in the same order, with operands of one `m`, 0 to `max_m`.
// Returns when `y` is written. Nobody else accesses the operands meanwhile.
flux_status flux_op_forward_host(const struct flux_op *op, const struct flux_operands *operands);

// As flux_op_forward_host, with operands in memory of the communicator's device. Puts the call on
// the stream and returns: it allocates no device memory and waits for nothing. The operands stay
// as they are until the stream has come past the call; then flux_comm_check says whether `y` may
// be read.
//
// stream    a CUstream or cudaStream_t of the device; NULL is its default stream. It may be in
//           capture, of ops with FLUX_OP_CAPTURES where flux_comm_graphs says 1, with an `m` that
//           was prepared or called before.
flux_status flux_op_forward_cuda(const struct flux_op *op,
                                 const struct flux_operands *operands,
                                 void *stream);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* FLUX_H */
