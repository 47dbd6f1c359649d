/* A tensor-parallel MLP, y = gelu(x w1^T + b1) w2^T + b2, on the host transport. Rows of x and y
 * are split over the ranks, as are the inner features. Fails if a number is off.
 *
 *   cc -std=c11 -pthread mlp.c -I../include -L../../target/release -lflux_tp_c -lm -o mlp
 *   export LD_LIBRARY_PATH=../../target/release
 *   ./mlp                            four ranks as threads
 *   mpirun -n 4 ./mlp launched       one rank of a launch; likewise srun, `flux-bench launch` */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <threads.h>

#include "flux.h"

enum { RANKS = 4, M = 13, FEATURES = 64, INNER = 32 /* of one rank */ };
enum { X, W1, B1, W2, B2 };

static void check(flux_status status, const char *what) {
    if (status != FLUX_OK) {
        fprintf(stderr, "%s: error %d: %s\n", what, (int)status, flux_last_error_message());
        exit(EXIT_FAILURE);
    }
}

/* An element of a global tensor, between -1 and 1 and exact in bf16. */
static double element(int tensor, size_t row, size_t col) {
    return (double)((row * 37 + col * 101 + (size_t)tensor * 53 + row * col * 7) % 129) / 64.0 - 1.0;
}

static uint16_t to_bf16(double value) { /* of one that is exact */
    float rounded = (float)value;
    uint32_t bits;
    memcpy(&bits, &rounded, sizeof bits);
    return (uint16_t)(bits >> 16);
}

static double from_bf16(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* A dense tensor: the part of a global one that begins at (row, col). */
static flux_tensor part(int tensor, size_t rows, size_t cols, size_t row, size_t col) {
    size_t bytes = (rows * cols * sizeof(uint16_t) + 63) / 64 * 64;
    uint16_t *data = aligned_alloc(64, bytes);
    if (data == NULL) exit(EXIT_FAILURE);
    for (size_t i = 0; i < rows * cols; i++) data[i] = to_bf16(element(tensor, row + i / cols, col + i % cols));
    return (flux_tensor){.data = data, .rows = rows, .cols = cols, .dtype = FLUX_BF16};
}

static double gelu(double v) {
    return 0.5 * v * (1.0 + tanh(0.7978845608028654 * (v + 0.044715 * v * v * v)));
}

/* Compares rows of y, from global row `first` on, with the same in double precision. Roundings that
 * may differ: the inner features, the partial sums, the result; fp32 adds less than a twentieth. */
static int differs(const flux_tensor *y, size_t first, size_t inner, double *largest) {
    const double roundoff = 1.05 / 256.0;
    double *h = malloc(inner * sizeof *h);
    if (h == NULL) exit(EXIT_FAILURE);
    for (size_t i = 0; i < y->rows; i++) {
        for (size_t f = 0; f < inner; f++) {
            double sum = element(B1, 0, f);
            for (size_t k = 0; k < FEATURES; k++) sum += element(X, first + i, k) * element(W1, f, k);
            h[f] = gelu(sum);
        }
        for (size_t j = 0; j < FEATURES; j++) {
            double exact = element(B2, 0, j), parts = 0.0;
            for (size_t f = 0; f < inner; f++) {
                exact += h[f] * element(W2, j, f);
                parts += 2.0 * fabs(h[f] * element(W2, j, f));
            }
            double found = from_bf16(((uint16_t *)y->data)[i * FEATURES + j]), off = fabs(found - exact);
            if (!(off <= roundoff * (fabs(exact) + parts))) {
                fprintf(stderr, "y[%zu, %zu] is %g, must be %g\n", first + i, j, found, exact);
                return 1;
            }
            *largest = fmax(*largest, off);
        }
    }
    free(h);
    return 0;
}

/* One rank: builds both layers, calls them, checks its rows. Returns 0 if all are right. */
static int rank_main(void *argument) {
    flux_comm *comm = argument;
    uint32_t rank, ranks;
    check(flux_comm_place(comm, &rank, &ranks, NULL), "place");
    /* A multiple of 8 that two or more ranks do not divide: the first has 8 features more. */
    size_t inner = (size_t)INNER * ranks + 8, first, rows, feature, features;

    flux_op_options options = {.size = sizeof options, .kind = FLUX_ALL_GATHER_GEMM, .dtype = FLUX_BF16, .max_m = 2 * M};
    options.n = inner, options.k = FEATURES, options.flags = FLUX_OP_BIAS, options.activation = FLUX_ACTIVATION_GELU;
    flux_op *up, *down;
    check(flux_op_create(comm, &options, &up), "create up");
    options.kind = FLUX_GEMM_REDUCE_SCATTER, options.n = FEATURES, options.k = inner, options.activation = FLUX_ACTIVATION_NONE;
    check(flux_op_create(comm, &options, &down), "create down");
    check(flux_op_rows(up, M, rank, &first, &rows), "rows");
    check(flux_op_columns(up, rank, &feature, &features), "columns");

    flux_tensor x = part(X, rows, FEATURES, first, 0), w1 = part(W1, features, FEATURES, feature, 0);
    flux_tensor b1 = part(B1, 1, features, 0, feature), h = part(X, M, features, 0, 0);
    flux_tensor w2 = part(W2, FEATURES, features, 0, feature), b2 = part(B2, 1, FEATURES, 0, 0);
    flux_tensor y = part(X, rows, FEATURES, 0, 0);
    flux_operands gather = {.size = sizeof gather, .x = &x, .w = &w1, .bias = &b1, .y = &h};
    flux_operands scatter = {.size = sizeof scatter, .x = &h, .w = &w2, .bias = &b2, .y = &y};
    check(flux_op_forward_host(up, &gather), "forward up");
    check(flux_op_forward_host(down, &scatter), "forward down");

    double largest = 0.0;
    int wrong = differs(&y, first, inner, &largest);
    printf("rank %u of %u: rows %zu to %zu, largest difference %.4f: %s\n", rank, ranks, first, first + rows, largest,
           wrong ? "wrong" : "right");
    flux_tensor all[] = {x, w1, b1, h, w2, b2, y};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i].data);
    check(flux_op_destroy(up), "destroy up");
    check(flux_op_destroy(down), "destroy down");
    check(flux_comm_destroy(comm), "destroy");
    return wrong;
}

int main(int count, char **words) {
    int launched = count == 2 && strcmp(words[1], "launched") == 0;
    if (count != 1 && !launched) {
        fprintf(stderr, "usage: %s [launched]\n", words[0]);
        return EXIT_FAILURE;
    }
    if (flux_abi_version() != FLUX_ABI_VERSION) {
        fprintf(stderr, "flux.h is of version %d, the library of %u\n", FLUX_ABI_VERSION, flux_abi_version());
        return EXIT_FAILURE;
    }
    flux_comm_options options = {.size = sizeof options, .transport = "host"};
    if (launched) {
        flux_comm *comm;
        check(flux_comm_from_env(&options, &comm), "connect");
        return rank_main(comm) ? EXIT_FAILURE : EXIT_SUCCESS;
    }
    flux_comm *comms[RANKS];
    thrd_t threads[RANKS];
    check(flux_comm_init_all(RANKS, &options, comms), "connect");
    int wrong = 0, result = 1;
    for (int rank = 0; rank < RANKS; rank++)
        if (thrd_create(&threads[rank], rank_main, comms[rank]) != thrd_success) return EXIT_FAILURE;
    for (int rank = 0; rank < RANKS; rank++) wrong += thrd_join(threads[rank], &result) != thrd_success || result != 0;
    return wrong ? EXIT_FAILURE : EXIT_SUCCESS;
}
