/*
 * mlxdist.h: the C API of the mlxdist engine, and the one file to read to know what it does.
 *
 * A *group* is a set of ranks (processes) that exchange messages over queue pairs, one connection
 * per pair of ranks. Its life:
 *
 *   1. every rank       mlxdist_group_create    opens the device, registers slabs, creates queue pairs
 *   2. every rank       mlxdist_group_address   says how its peers reach it
 *   3. side channel     all_gather of the addresses (not part of this library)
 *   4. every rank       mlxdist_group_connect   queue pairs to RTS, receives posted
 *   5. side channel     barrier: nobody may send before every receive is posted
 *   6. any thread       collectives and messages
 *   7. every rank       mlxdist_group_finalize  waits until the peers have everything, then closes
 *
 * Rules that hold for every operation:
 *  - all ranks call the same collectives of a group in the same order, with the same dtype and shape;
 *    a difference is an error on every rank that meets it, which names both sides;
 *  - calls of several threads on one group are carried out one after the other;
 *  - pointers are aligned to their element; `out` may equal `in` (in place), any other overlap is undefined;
 *  - the call returns when `out` is complete and `in` may be reused;
 *  - every wait ends: with the data, by the group's timeout, or by mlxdist_group_abort;
 *  - once an operation has failed the group is failed: later operations return the first error.
 *
 * Functions return MLXDIST_OK or an error whose text is mlxdist_last_error().
 */
#ifndef MLXDIST_H
#define MLXDIST_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#pragma GCC visibility push(default) /* libmlxdist is built with hidden visibility: it exports these alone */

/* cffi begins */

/* What went wrong. The text of mlxdist_last_error() says where, and what to do. */
typedef enum mlxdist_status {
  MLXDIST_OK = 0,
  MLXDIST_INVALID_ARGUMENT = 1, /* refused before any work */
  MLXDIST_MISMATCH = 2,         /* ranks disagree on the operation, dtype, shape or root */
  MLXDIST_TIMEOUT = 3,          /* no progress until the deadline */
  MLXDIST_ABORTED = 4,          /* mlxdist_group_abort, on this rank or another */
  MLXDIST_PEER_LOST = 5,        /* a peer died or left the group */
  MLXDIST_TRANSPORT = 6,        /* a queue pair, completion or message was wrong */
  MLXDIST_RESOURCES = 7,        /* out of memory or of a device's objects */
} mlxdist_status;

/* Element types: those of MLX, in MLX's order. */
typedef enum mlxdist_dtype {
  MLXDIST_BOOL = 0,
  MLXDIST_UINT8 = 1,
  MLXDIST_UINT16 = 2,
  MLXDIST_UINT32 = 3,
  MLXDIST_UINT64 = 4,
  MLXDIST_INT8 = 5,
  MLXDIST_INT16 = 6,
  MLXDIST_INT32 = 7,
  MLXDIST_INT64 = 8,
  MLXDIST_FLOAT16 = 9,
  MLXDIST_FLOAT32 = 10,
  MLXDIST_FLOAT64 = 11,
  MLXDIST_BFLOAT16 = 12,
  MLXDIST_COMPLEX64 = 13,
} mlxdist_dtype;

/* Reductions. Sums of bool are logical or, products logical and; integers wrap; max and min
 * propagate NaN as numpy.maximum does and order complex numbers by real, then imaginary part. */
typedef enum mlxdist_op {
  MLXDIST_SUM = 0,
  MLXDIST_MAX = 1,
  MLXDIST_MIN = 2,
  MLXDIST_PROD = 3,
} mlxdist_op;

/* dtype and shape of an array. Arrays of more dimensions fold the trailing ones into the last. */
typedef struct mlxdist_layout {
  int32_t dtype;    /* mlxdist_dtype */
  int32_t ndim;     /* 0 (one element) to 6 */
  int64_t shape[6];
} mlxdist_layout;

typedef struct mlxdist_options {
  double timeout;            /* seconds without progress before a wait fails; 0 waits for ever */
  uint32_t bulk_slot_bytes;  /* size of a bulk slab slot, a multiple of 4096 */
  uint32_t bulk_slots;       /* bulk slots per peer and direction */
  uint32_t eager_slots;      /* eager slots (4096 bytes) per peer and direction */
} mlxdist_options;

/* Counters since the group was created. "provider_" counters are kept by the verbs provider itself,
 * below the endpoint: that both agree proves that every byte went through the verbs. */
typedef struct mlxdist_stats {
  uint64_t collectives;        /* operations of all ranks, barriers included */
  uint64_t point_to_point;     /* send and recv */
  uint64_t payload_bytes_sent; /* the user's bytes */
  uint64_t header_bytes_sent;  /* headers and descriptors */
  uint64_t payload_bytes_received;
  uint64_t messages_sent;      /* work requests: data and control */
  uint64_t messages_received;
  uint64_t control_messages_sent; /* acknowledgements and aborts that found no ride */
  uint64_t bytes_copied;       /* by this rank's CPU, above the verbs: into slots and out of them */
  uint64_t post_send_calls;
  uint64_t post_recv_calls;
  uint64_t poll_cq_calls;
  uint64_t receives_posted;    /* receives that wait for a message now, all queue pairs */
  uint64_t memory_registrations;
  uint64_t slab_bytes;         /* registered memory, all peers */
  uint64_t wait_ns;            /* time in which an operation found nothing to do */
  uint64_t operation_ns;       /* time in operations, waits included */
  uint64_t provider_sends;
  uint64_t provider_receives;
  uint64_t provider_polls;
  uint64_t provider_bytes_sent;
  uint64_t provider_dropped;   /* sends that met no posted receive */
} mlxdist_stats;

typedef struct mlxdist_group mlxdist_group;

/* "0.1.0": of the library, which must equal the Python package's. */
const char *mlxdist_version(void);

/* Text of this thread's last error: one paragraph, what happened, where, what to do. */
const char *mlxdist_last_error(void);

/* Bytes of one element, 0 for an unknown dtype; names as MLX spells them. */
uint32_t mlxdist_dtype_size(int32_t dtype);
const char *mlxdist_dtype_name(int32_t dtype);

/* Name of the provider in use ("soft") and why it was chosen ("no RDMA device found"). */
const char *mlxdist_group_provider(mlxdist_group *group);
const char *mlxdist_group_provider_reason(mlxdist_group *group);

void mlxdist_default_options(mlxdist_options *options);

/* Opens the device and creates slabs and queue pairs for every peer. `options` may be NULL. */
int mlxdist_group_create(int32_t rank, int32_t size, const mlxdist_options *options, mlxdist_group **group);

/* How the peers reach this rank: `mlxdist_group_address_size()` bytes into `address`. */
uint64_t mlxdist_group_address_size(mlxdist_group *group);
int mlxdist_group_address(mlxdist_group *group, void *address);

/* `addresses`: the addresses of all ranks, in rank order, one after the other. */
int mlxdist_group_connect(mlxdist_group *group, const void *addresses, uint64_t bytes);

int32_t mlxdist_group_rank(mlxdist_group *group);
int32_t mlxdist_group_size(mlxdist_group *group);

/* Fails the group: every wait on it ends with `status` and `reason`. Safe from any thread. */
void mlxdist_group_abort(mlxdist_group *group, int32_t status, const char *reason);

/* MLXDIST_OK while the group works; else its first error, with the text in mlxdist_last_error(). */
int mlxdist_group_error(mlxdist_group *group);

void mlxdist_group_stats(mlxdist_group *group, mlxdist_stats *stats);

/* Waits until every rank has come here and has acknowledged everything. A rank that finalizes while others
 * still communicate with it is a mismatch, on both sides. The group then takes no more operations; its
 * memory stays valid until mlxdist_group_destroy. */
int mlxdist_group_finalize(mlxdist_group *group);
void mlxdist_group_destroy(mlxdist_group *group);

/* out[i] = in_0[i] op in_1[i] op ... op in_{n-1}[i], accumulated in rank order. 16-bit floats are
 * accumulated in float32 and rounded once. Every rank ends with bitwise the same result. */
int mlxdist_all_reduce(mlxdist_group *group, const void *in, void *out, const mlxdist_layout *layout, int32_t op);

/* out = in_0, in_1, ..., in_{n-1}: size * in bytes. */
int mlxdist_all_gather(mlxdist_group *group, const void *in, void *out, const mlxdist_layout *layout);

/* Reduces as all_reduce does and leaves the rank-th of `size` equal parts in `out`. `layout` is that of
 * `in`; its first dimension must be a multiple of the group's size. In place: `out` equals `in`. */
int mlxdist_reduce_scatter(mlxdist_group *group, const void *in, void *out, const mlxdist_layout *layout, int32_t op);

/* Copies the root's `data` to all ranks' `data`. */
int mlxdist_broadcast(mlxdist_group *group, void *data, const mlxdist_layout *layout, int32_t root);

/* Returns once every rank has entered. */
int mlxdist_barrier(mlxdist_group *group);

/* Point to point, matched in order per pair of ranks. send returns when `data` may be reused. */
int mlxdist_send(mlxdist_group *group, const void *data, const mlxdist_layout *layout, int32_t to);
int mlxdist_recv(mlxdist_group *group, void *data, const mlxdist_layout *layout, int32_t from);

/* Both directions at once: cannot deadlock, whatever the sizes. */
int mlxdist_sendrecv(mlxdist_group *group, const void *send, const mlxdist_layout *send_layout, int32_t to,
                     void *recv, const mlxdist_layout *recv_layout, int32_t from);

/* cffi ends */

#pragma GCC visibility pop

#ifdef __cplusplus
}
#endif

#endif
