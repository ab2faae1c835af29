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
 *   5. side channel     barrier: no rank may send before every receive is posted
 *   6. any thread       collectives and messages; mlxdist_group_split makes groups of some of the ranks,
 *                       which share its queue pairs
 *   7. every rank       mlxdist_group_finalize  waits until it has everything
 *   8. side channel     barrier: until all have, this rank sends again what others miss
 *   9. every rank       mlxdist_group_destroy
 *
 * Rules that hold for every operation:
 *  - all ranks call the same operations of a group in the same order, with the same dtype and shape; what a thread
 * hands to another one counts when it does so (mlxdist_enqueue). A difference is an error on every rank that meets it,
 * which names both sides;
 *  - the call returns when `out` is complete and `in` may be reused. Groups have no order among each other: several
 *    threads, each with groups of its own, go on side by side. A rank whose threads all wait in one group while others
 *    wait for it in another is a deadlock: mlxdist_waits and mlxdist_come let the side channel find it;
 *  - `call->starts`: the call only starts the operation. Memory belongs to the operation until the handle is done;
 *    operations on different groups may then end in any order;
 *  - no thread holds a lock while waiting. A waiting thread progresses all groups; when none waits,
 *    the library's own thread does;
 *  - pointers are aligned to their element; `out` may equal `in` (in place), any other overlap is undefined;
 *  - every wait ends: with the data, by a deadline, or by mlxdist_group_abort;
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

/* dtype and shape of an array. Arrays of more dimensions fold the trailing ones into the last. What stands in `shape`
 * behind the dimensions is not used, but must be equal on all ranks, as all else here: 0, or a hash of what the array
 * was packed from. */
typedef struct mlxdist_layout {
  int32_t dtype; /* mlxdist_dtype */
  int32_t ndim;  /* 0 (one element) to 6 */
  int64_t shape[6];
} mlxdist_layout;

/* How a collective moves its data; docs/architecture.md compares them. One that an operation does not have is passed
 * over for the operation's own choice. */
typedef enum mlxdist_algorithm {
  MLXDIST_AUTO = 0,
  MLXDIST_DIRECT = 1,             /* everyone to everyone at once */
  MLXDIST_MESH = 2,               /* reduce_scatter, then all_gather, each direct */
  MLXDIST_RING = 3,               /* neighbour to neighbour, n - 1 steps each way */
  MLXDIST_RECURSIVE_DOUBLING = 4, /* log2(n) steps with partners at distance 1, 2, 4 ... */
  MLXDIST_TREE = 5,         /* log2(n) steps from or to the root; all_reduce: a star, to the first rank and back */
  MLXDIST_HIERARCHICAL = 6, /* direct within each host, then between hosts; where all have as many ranks, two or more */
} mlxdist_algorithm;

/* The operations that have more than one algorithm. */
typedef enum mlxdist_operation {
  MLXDIST_ALL_REDUCE = 1,
  MLXDIST_ALL_GATHER = 2,
  MLXDIST_REDUCE_SCATTER = 3,
  MLXDIST_BROADCAST = 4,
  MLXDIST_BARRIER = 5,
  MLXDIST_REDUCE = 6,
  MLXDIST_GATHER = 7,
  MLXDIST_SCATTER = 8,
  MLXDIST_ALL_TO_ALL = 9,
} mlxdist_operation;

/* A line of the tuning table: `operation` on `ranks` ranks of `hosts` hosts with at most `bytes` (of `in`) uses
 * `algorithm`. The first line that fits counts. */
typedef struct mlxdist_tuning {
  int32_t operation;
  int32_t ranks;
  int32_t hosts;
  uint64_t bytes;
  int32_t algorithm;
} mlxdist_tuning;

/* For benchmarks: bytes that go from one core to another and back, again and again. All five arrays have `bytes` and do
 * not overlap. Side 0 is the calling thread, side 1 one that is made for it. */
typedef struct mlxdist_core_transfer {
  uint64_t bytes;
  uint64_t count;      /* of round trips */
  int32_t cores[2];    /* that the sides are kept on, where the system can do that; negative: on any */
  void* shared;        /* which each side copies into and the other copies out of */
  const void* sent[2]; /* by each side */
  void* received[2];
} mlxdist_core_transfer;

/* Of the world. A rank's number travels in 15 bits, but connections between every two of more ranks do not fit a
 * device. The launcher has the same limits: CMake writes both into mlxdist/_built.py. */
#define MLXDIST_MAX_RANKS 256
#define MLXDIST_MAX_LINKS 4 /* between two ranks */

/* By what messages to one rank leave. */
typedef struct mlxdist_link {
  const char* provider; /* "soft", "ibverbs" or "librdma"; NULL: there is no such link */
  const char* device;   /* its name. Each link of two ranks has a device of its own */
  int32_t gid_index;    /* of the address in the device's table by which the rank reaches this one; -1: the software
                           provider's in memory */
} mlxdist_link;

typedef struct mlxdist_options {
  double timeout;            /* seconds without progress before a wait fails, once the rank that it waits for is in
                                the operation too; 0: no limit */
  double entry_timeout;      /* seconds that a rank may come later to an operation than this one; 0: no limit */
  double stall_warning;      /* seconds after which a wait is noted in the debug output; 0: never */
  uint32_t bulk_slot_bytes;  /* size of a bulk slab slot, a multiple of 4096 */
  uint32_t bulk_slots;       /* bulk slots per peer and direction */
  uint32_t eager_slots;      /* eager slots (4096 bytes) per peer and direction */
  uint32_t links_per_peer;   /* devices that large messages to a peer are spread over: 1 to MLXDIST_MAX_LINKS */
  const mlxdist_link* links; /* size x MLXDIST_MAX_LINKS: those to rank 0, to rank 1 ...; NULL: that many devices of the
                                software provider to every rank. Copied */
  int32_t reliable;          /* 1: queue pairs of the reliable connection (RC) instead of UC; not by every device */
  double meet_after;         /* seconds since a peer was last heard in an operation after which mlxdist_enqueue wants a
                                meeting with it; 0: never */
  double keepalive;          /* seconds after which a queue pair that carries nothing sends a sign of life; 0: never */
  int32_t has_key;           /* 1: there is a key, */
  uint8_t key[16];           /* which the ranks of the job know: the software provider takes only them from outside */
  const uint8_t* adjacency;  /* size x size: whether a link joins two ranks; NULL: it joins all. Where not all are,
                            operations run around the ring of the cables, or are refused */
  const int32_t* hosts;      /* a number for each rank, alike for those of one host; NULL: all are on one. Copied */
  uint32_t on_demand_threshold; /* worlds of up to this many ranks connect all pairs at the start, larger ones on first
                                   use */
  int32_t algo;                 /* mlxdist_algorithm to use wherever an operation has it */
  int32_t checksum;             /* 1: every message carries a CRC32C, and what arrives damaged is retransmitted */
  uint32_t largest_message;     /* that arrives on every link of the job, as peer probes have found; 0: as ports say */
  const char* host;             /* name of this machine, for error texts; NULL: the system's. Copied */
  const char* soft_profile;     /* the device that the software provider plays: "ideal", "apple-tb5", "apple-tb5-26.2",
                                   "apple-tb5-27", "apple-odd", "rxe" */
} mlxdist_options;

/* Counters since the group was created. Operations, bytes and times are the group's own; queue pairs, and what they
 * count (messages, headers, posts, polls, registrations), are shared by all groups of the process. "provider_"
 * counters are kept by the verbs provider itself,
 * below the endpoint: that both agree proves that every byte went through the verbs. */
typedef struct mlxdist_stats {
  uint64_t collectives;        /* operations of all ranks, barriers included, that have ended well */
  uint64_t point_to_point;     /* likewise send, recv and sendrecv */
  uint64_t payload_bytes_sent; /* the user's bytes */
  uint64_t header_bytes_sent;  /* headers and descriptors */
  uint64_t padding_bytes_sent; /* behind a message, where the device sends whole frames only */
  uint64_t payload_bytes_received;
  uint64_t messages_sent; /* work requests: data and control */
  uint64_t messages_received;
  uint64_t control_messages_sent; /* acknowledgements and aborts that found no ride */
  uint64_t bytes_copied;          /* by this rank's CPU, above the verbs: into slots and out of them */
  uint64_t post_send_calls;
  uint64_t post_recv_calls;
  uint64_t poll_cq_calls;
  uint64_t receives_posted;  /* receives that wait for a message now, all queue pairs */
  uint64_t retransmissions;  /* messages that left again */
  uint64_t duplicates;       /* messages that arrived twice, and were dropped */
  uint64_t damaged;          /* messages that arrived cut off, or with a wrong checksum, and were dropped */
  uint64_t reconnections;    /* queue pairs that failed and were re-created */
  uint64_t meetings;         /* operations that were handed over only once their peers had come, see mlxdist_enqueue */
  uint64_t meeting_messages; /* the acknowledgements of it, and messages of the side channel */
  uint64_t memory_registrations;
  uint64_t registration_hits; /* uses of a registered buffer that found its registration */
  uint64_t registered_bytes;  /* of user buffers, now */
  uint64_t slab_bytes;        /* registered memory, all peers */
  uint64_t wait_ns;           /* time in which an operation found nothing to do, spinning (0.5 us) not counted */
  uint64_t operation_ns;      /* time in operations that have ended well, waits included */
  uint64_t provider_sends;
  uint64_t provider_receives;
  uint64_t provider_polls;
  uint64_t provider_bytes_sent;
  uint64_t provider_dropped;          /* sends that met no posted receive */
  uint64_t provider_dropped_by_fault; /* see mlxdist_group_inject_faults */
} mlxdist_stats;

/* Operations of one name since the group was created. Only those that have ended well count: one that fails, fails its
 * group. */
typedef struct mlxdist_operation_stats {
  char operation[24]; /* as in the flight recorder: "all_sum" */
  uint64_t calls;
  uint64_t payload_bytes_sent; /* the user's bytes; how often they travel is the algorithm's choice */
  uint64_t payload_bytes_received;
  uint64_t ns; /* from the start of each, when its transfers are issued, to its end, waits included */
} mlxdist_operation_stats;

#define MLXDIST_OPERATION_NAMES 64 /* no group has entries for more operations */

typedef struct mlxdist_group mlxdist_group;
typedef struct mlxdist_handle mlxdist_handle; /* an operation that has been started */
typedef struct mlxdist_region mlxdist_region; /* memory that has been registered */

/* "0.1.0": of the library, which must equal the Python package's. */
const char* mlxdist_version(void);

/* Text of this thread's last error: one paragraph, what happened, where, what to do. */
const char* mlxdist_last_error(void);

/* Bytes of one element, 0 for an unknown dtype; names as MLX spells them. */
uint32_t mlxdist_dtype_size(int32_t dtype);
const char* mlxdist_dtype_name(int32_t dtype);

/* What an address of a device is good for. */
typedef enum mlxdist_gid_type {
  MLXDIST_GID_IB = 0,      /* InfiniBand */
  MLXDIST_GID_ROCE_V1 = 1, /* RDMA over Ethernet frames: does not leave the segment */
  MLXDIST_GID_ROCE_V2 = 2, /* over UDP */
  MLXDIST_GID_UNKNOWN = 3, /* the provider does not say: Thunderbolt */
  MLXDIST_GID_MEMORY = 4,  /* the software provider's: processes of this host */
  MLXDIST_GID_TCP = 5,     /* the software provider's: other hosts */
} mlxdist_gid_type;

/* An address of a device, a line of its port's table. */
typedef struct mlxdist_gid {
  uint8_t bytes[16];
  int32_t index;      /* of the line */
  int32_t type;       /* mlxdist_gid_type */
  int32_t prefix;     /* ::ffff:a.b.c.d: bits of the IPv4 subnet; -1 where that is not known */
  char interface[16]; /* "en2"; "" where there is none */
} mlxdist_gid;

#define MLXDIST_GIDS 64 /* addresses of a device that are listed, at most */

/* What a probe tries at most: a result that is equal to it means that many or more. */
#define MLXDIST_PROBE_QUEUE_PAIRS 16
#define MLXDIST_PROBE_RECEIVES 8191
#define MLXDIST_PROBE_INLINE 256
#define MLXDIST_PROBE_REGIONS 128
#define MLXDIST_PROBE_REGION_BYTES 33554432

/* What a device takes, found by trying. */
typedef struct mlxdist_probe {
  char error[160];           /* the call that failed, and how; "" where everything below is known */
  int32_t uc, rc;            /* 1: a queue pair of the unreliable, of the reliable connection can be made */
  int32_t queue_pairs;       /* at one time; of UC where there is that, else of RC */
  int32_t queue_pair_errno;  /* why there was no further one; 0 where the provider does not say, or was not asked */
  int32_t receives;          /* that a queue pair has room for; the largest of 8191, 4095, 2047, ... */
  int32_t inline_bytes;      /* that a send may carry in its work request; the largest of 256, 128, ..., 16; or 0 */
  int32_t region_local;      /* 1: a region takes LOCAL_WRITE alone, */
  int32_t region_remote;     /* with REMOTE_READ and REMOTE_WRITE; */
  int32_t queue_pair_local;  /* likewise a queue pair */
  int32_t queue_pair_remote; /* at INIT */
  int32_t regions;           /* at one time */
  uint64_t region_bytes;     /* of one region, in steps of 16 KiB */
  int32_t kept;              /* objects that the device did not take back */
  uint32_t microseconds;     /* that the probe took */
} mlxdist_probe;

typedef struct mlxdist_device {
  char name[64];
  char error[160]; /* the call that failed, and how; "" where everything below is known */
  char firmware[64];
  uint8_t guid[8];    /* of the device */
  int32_t transport;  /* enum ibv_transport_type */
  int32_t ports;      /* what follows is of the first one, which is the one that is used */
  int32_t state;      /* enum ibv_port_state: 4 is active */
  int32_t link_layer; /* 1: InfiniBand, 2: Ethernet */
  int32_t width;      /* ibv_port_attr.active_width, active_speed */
  int32_t speed;
  int32_t active_mtu; /* bytes; 0 where the device does not say */
  int32_t max_mtu;
  uint32_t max_message;
  uint64_t max_mr_size;
  int32_t max_qp;
  int32_t max_qp_wr;
  int32_t max_sge;
  int32_t max_cq;
  int32_t max_cqe;
  int32_t max_mr;
  int32_t max_pd;
  mlxdist_probe probe;            /* all zero where none was requested */
  int32_t gid_count;              /* of those below */
  mlxdist_gid gids[MLXDIST_GIDS]; /* those that are not zero */
} mlxdist_device;

/* The devices of a provider ("soft", "ibverbs", "librdma"): writes the first `room` of them and returns their number,
 * or -1 with the text in mlxdist_last_error(). Each is opened and closed. `soft_profile` counts for "soft".
 * `probe`: 1 to probe each active device, too, which takes all its queue pairs for a moment: no job should run. */
int64_t mlxdist_devices(const char* provider, const char* soft_profile, int32_t probe, mlxdist_device* devices,
                        uint64_t room);

/* The call of the library that mlxdist_devices is in, in any thread: "ibv_open_device(rdma_en2)"; "" in none. Drivers
 * have calls that never return. */
void mlxdist_devices_call(char* text, uint64_t room);

/* A probe of devices with a peer, for what no device says of itself: how long a message may be, and how it arrives. All
 * ranks that have such links to each other take part, and take each step together, before they create a group:
 *
 *   mlxdist_peer_probe_open      opens the devices of options->links; also of the options count the numbers of slots,
 *                                key, soft_profile and reliable
 *   mlxdist_peer_probe_prepare   makes queue pairs, whose receives of bulk messages have `receive_bytes`; those of the
 *                                step before are given back. `address`: mlxdist_peer_probe_address_size() bytes, by
 *                                which the peers reach them
 *   mlxdist_peer_probe_connect   with the addresses of all ranks: receives are posted
 *   mlxdist_peer_probe_send      sends messages that fill the receives, and in the first round an empty one, in later
 *                                ones one that needs two receives
 *   mlxdist_peer_probe_receive   when all have sent: waits for what arrives, 10 ms at most
 *
 * and again from `prepare` on with smaller receives, while larger messages do not arrive. */
#define MLXDIST_PEER_PROBE_BYTES 131072 /* the largest receives that are tried */
#define MLXDIST_PEER_PROBE_FAILURE 48

typedef struct mlxdist_peer_probe mlxdist_peer_probe;

/* What one end of a link has received in a round. */
typedef struct mlxdist_peer_finding {
  int32_t arrives;                         /* 1: messages that fill the receives */
  int32_t receives;                        /* of that size that were posted at one time, if they arrive */
  int32_t empty;                           /* in the first round 1: an empty message arrived */
  int32_t lengths;                         /* 1: byte_len of all that arrived was right */
  int32_t packets;                         /* in later rounds 1: a message of 8192 bytes filled two receives of 4096 */
  char failed[MLXDIST_PEER_PROBE_FAILURE]; /* why they do not arrive: "LOC_LEN_ERR" */
  char longer[MLXDIST_PEER_PROBE_FAILURE]; /* likewise the message of 8192 bytes */
} mlxdist_peer_finding;

int mlxdist_peer_probe_open(int32_t rank, int32_t size, const mlxdist_options* options, mlxdist_peer_probe** probe);
uint64_t mlxdist_peer_probe_address_size(const mlxdist_peer_probe* probe);
int mlxdist_peer_probe_prepare(mlxdist_peer_probe* probe, uint32_t receive_bytes, void* address);
int mlxdist_peer_probe_connect(mlxdist_peer_probe* probe, const void* addresses, uint64_t bytes);
void mlxdist_peer_probe_send(mlxdist_peer_probe* probe);
/* `findings`: size x MLXDIST_MAX_LINKS, in the order of the links. */
void mlxdist_peer_probe_receive(mlxdist_peer_probe* probe, mlxdist_peer_finding* findings);
void mlxdist_peer_probe_close(mlxdist_peer_probe* probe);

/* What to do about a port of a Mac in bridge0 or without an IPv4 address; errors of connecting say it, too. */
const char* mlxdist_port_remedy(void);

/* Name of the provider in use ("soft"), or of all of them ("ibverbs+soft"). */
const char* mlxdist_group_provider(mlxdist_group* group);

void mlxdist_default_options(mlxdist_options* options);

/* Debug output of this process: `spec` "off", "warn", "info" or "trace", and behind a colon the subsystems that it is
 * wanted from ("trace:link,connection"); NULL: "warn". Lines go to a copy of the descriptor `file`; -1: standard
 * error. */
int mlxdist_debug_open(const char* spec, int file, int32_t rank);

/* Opens the device and creates slabs and queue pairs for every peer. `options` may be NULL. */
int mlxdist_group_create(int32_t rank, int32_t size, const mlxdist_options* options, mlxdist_group** group);

/* How the peers reach this rank: `mlxdist_group_address_size()` bytes into `address`. */
uint64_t mlxdist_group_address_size(mlxdist_group* group);
int mlxdist_group_address(mlxdist_group* group, void* address);

/* `addresses`: the addresses of all ranks, in rank order, one after the other. */
int mlxdist_group_connect(mlxdist_group* group, const void* addresses, uint64_t bytes);

/* How the bytes of a connection that is made on first use reach the peer: `send` is called from any thread, must not
 * call the library, and brings them to the peer's mlxdist_group_side_channel_receive, in order. Set before the first
 * operation. */
typedef void (*mlxdist_side_channel)(void* context, int32_t to, const void* bytes, uint64_t length);
void mlxdist_group_set_side_channel(mlxdist_group* group, mlxdist_side_channel send, void* context);
int mlxdist_group_side_channel_receive(mlxdist_group* group, int32_t from, const void* bytes, uint64_t length);

/* What the side channel has heard of a rank, in words for notices and errors: "in all_gather #412 for 12.3 s". */
void mlxdist_group_set_peer_status(mlxdist_group* group, int32_t rank, const char* text);

/* How many signs of life of a rank the data path has brought so far: messages and acknowledgements from it, and
 * operations that did not end without it. Requests one more where the two are connected: the reply counts later, and
 * may be lost. Any thread. */
uint64_t mlxdist_group_signs_of_life(mlxdist_group* group, int32_t rank);

/* The deadline of the group's operations, in seconds without progress: also for a rank that has not come yet. 0: none.
 * Negative: the two of the options. */
void mlxdist_group_set_timeout(mlxdist_group* group, double seconds);
double mlxdist_group_timeout(mlxdist_group* group);

int32_t mlxdist_group_rank(mlxdist_group* group);
int32_t mlxdist_group_size(mlxdist_group* group);
int32_t mlxdist_group_id(mlxdist_group* group); /* 0: the world. Two with the same id have no two members in common */

/* The ranks of the world as a group with an order of its own, for operations that have their place when a thread of
 * MLX's streams comes to them: those of the world have it when they are evaluated, which on one rank is before, on
 * another after the former. They count as operations of the world; the lane ends with it. */
mlxdist_group* mlxdist_group_stream_lane(mlxdist_group* world);

/* Fails the group: every wait on it ends with `status` and `reason`. Safe from any thread. */
void mlxdist_group_abort(mlxdist_group* group, int32_t status, const char* reason);

/* The same, and sends it to all other ranks as an operation that fails does: for what a caller finds in a result. */
void mlxdist_group_fail(mlxdist_group* group, int32_t status, const char* reason);

/* MLXDIST_OK while the group works; else its first error, with the text in mlxdist_last_error(). */
int mlxdist_group_error(mlxdist_group* group);

void mlxdist_group_stats(mlxdist_group* group, mlxdist_stats* stats);

/* The same by operation: writes up to `room` entries, those of operations that have been called, and returns their
 * number. */
uint64_t mlxdist_group_operation_stats(mlxdist_group* group, mlxdist_operation_stats* entries, uint64_t room);

/* Waits until every rank has come here. A rank that finalizes while others still communicate with it is a mismatch,
 * on both sides. The group then takes no more operations, but still sends again what others miss, until
 * mlxdist_group_destroy: not to be called before all ranks have returned from here, as the side channel knows. */
int mlxdist_group_finalize(mlxdist_group* group);
void mlxdist_group_destroy(mlxdist_group* group);

/* What an operation brings along. NULL in place of one: nothing in particular, and the call waits for the end. */
typedef struct mlxdist_call {
  double timeout; /* its deadline in seconds without progress, 0 for none; negative: the group's */
  const char*
      call_site;    /* where in the program it is called: "train.py:88", of which 47 characters are kept; or NULL */
  uint64_t label;   /* which operation of the program it is (mlxdist_label); 0: not known */
  int32_t starts;   /* 1: the call only starts the operation, and leaves its handle in `handle`; NULL on errors */
  int32_t enqueued; /* 1: mlxdist_enqueue has taken these places */
  mlxdist_handle* handle;
  uint64_t place;         /* among the collectives of its group, */
  uint64_t send, receive; /* or among the messages to and from one peer; from 1, 0: none */
} mlxdist_call;

/* Makes a group of the ranks of `group` that pass the same `color`, numbered by `key`, then by rank. Collective over
 * `group`. A negative color takes part and gets none: *result is NULL. Groups made here end with
 * mlxdist_group_destroy, in any order, before the group that connects them. Threads may split different groups at once,
 * in any order; one group by one thread at a time, as its ranks would not know which of two they answer. */
int mlxdist_group_split(mlxdist_group* group, int32_t color, int32_t key, mlxdist_call* call, mlxdist_group** result);

/* The label of a text: "model.layers.3.self_attn #2". Two ranks whose operations have labels that differ disagree on
 * what they call, even where dtype and shape agree. 0 for NULL and "". Any thread. */
uint64_t mlxdist_label(const char* text);

/* That of an operation in the backward pass of another one. 0 stays 0. */
uint64_t mlxdist_label_of_adjoint(uint64_t label);

/* An operation, as the flight recorder keeps it. */
typedef struct mlxdist_flight_record {
  uint64_t number;     /* among all operations of this process, from 1 */
  uint64_t sequence;   /* among the collectives of its group on this rank, or the others, from 1 */
  uint64_t started_ns; /* of this host's steady clock, time.monotonic_ns() of Python */
  uint64_t ended_ns;   /* 0: it is in progress */
  uint64_t bytes;      /* of the array */
  int32_t group;       /* 0: the world; mlxdist_flight_members says who is in it */
  int32_t internal;    /* 1: it was made by the library itself, beside the group (split), and is counted apart */
  int32_t collective;  /* 0: send, recv and sendrecv */
  int32_t status;      /* mlxdist_status it ended with */
  int32_t waits_for;   /* a rank of the world that it waits for, or waited for when it failed; -1 where there is none */
  int32_t to, from;    /* ranks of the world, of what is no collective; -1 where there is none */
  int32_t root;        /* rank of the group, -1 where there is none */
  int32_t algorithm;   /* mlxdist_algorithm */
  mlxdist_layout layout; /* of the array; ndim is -1 where there is none */
  char operation[24];    /* "all_sum" */
  char call_site[48];    /* "train.py:88", where it was started; "" where that is not known */
} mlxdist_flight_record;

/* The flight recorder of this rank: the operations in progress, of all groups, and the last 1000 that have ended.
 * Writes the newest `room` of them into `entries`, oldest first, and returns their number; 0 also where the engine is
 * stuck. Safe from any thread. */
uint64_t mlxdist_flight_read(mlxdist_group* group, mlxdist_flight_record* entries, uint64_t room);

/* The number of members of the group with this id, and their ranks in the world; 0 if it has ended. */
uint64_t mlxdist_flight_members(mlxdist_group* group, int32_t id, int32_t* members, uint64_t room);

/* An operation in progress. */
typedef struct mlxdist_wait {
  uint64_t number;         /* among all operations of this process, from 1 */
  uint64_t stuck_ns;       /* for so long it has not got on */
  uint32_t progress_count; /* so often it has got on */
  int32_t rank;            /* of the world, that must come to it before it can go on; -1: there is none now */
  int32_t group;           /* its number, also of one that the library has made for itself */
  int32_t receives;        /* what comes from that rank; 0: what goes to it */
  uint64_t transfer;       /* which one of that rank's: its place on the wire, and its index in the lower 16 bits */
  int32_t lazy;            /* a thread of MLX carries it out */
  char name[288];          /* "recv of float32 [3] in group 1 (ranks 0, 2)" */
} mlxdist_wait;

/* A thread that waits in the engine, or has done so. */
typedef struct mlxdist_waiting_thread {
  uint64_t thread; /* its ident in Python; 0 in entries that are not in use */
  uint64_t id;     /* its native_id there */
  uint64_t number; /* of the operation that it waits for; 0: it does not wait */
  int32_t timed;   /* it waits for a time of its own, and may go on without the operation */
} mlxdist_waiting_thread;

enum mlxdist_limits { MLXDIST_THREADS = 64 };

/* What this rank waits for, in all groups: writes at most `room` operations and MLXDIST_THREADS entries. Returns the
 * number of operations; UINT64_MAX where there are more, or the engine is stuck. Safe from any thread. */
uint64_t mlxdist_waits(mlxdist_group* group, mlxdist_wait* waits, uint64_t room, mlxdist_waiting_thread* threads);

/* What a thread of this process does. */
typedef enum mlxdist_thread_state {
  MLXDIST_THREAD_RUNS = 0,    /* or does when there is a core for it */
  MLXDIST_THREAD_OUTSIDE = 1, /* waits for time to pass, for input, or for another process */
  MLXDIST_THREAD_TIMED = 2,   /* waits for another thread, up to a limit: also for Python's interpreter lock */
  MLXDIST_THREAD_WAITS = 3,   /* waits for another thread of this process, without a limit */
} mlxdist_thread_state;

typedef struct mlxdist_thread {
  uint64_t id;     /* its native_id in Python */
  uint64_t run_ns; /* for so long it has run */
  int32_t state;
} mlxdist_thread;

/* All threads of this process but the library's own: writes at most `room`. Returns how many; UINT64_MAX where there
 * are more, or the system does not list them. Not one moment: other threads run on meanwhile. */
uint64_t mlxdist_threads(mlxdist_group* group, mlxdist_thread* threads, uint64_t room);

/* What `rank` waits for: group, receives and stream of its mlxdist_wait. */
typedef struct mlxdist_edge {
  int32_t rank, group, receives;
  uint64_t transfer;
} mlxdist_edge;

/* A place of mlxdist_call as it is part of a transfer. */
uint32_t mlxdist_place_on_wire(uint64_t place);
enum mlxdist_index { MLXDIST_MESSAGE = 0xffff }; /* the index of what send, recv and sendrecv transfer */

/* Whether this rank has come to what others wait for. For each: 0 if it has not, the number of the operation in
 * progress here that must get on first, or UINT64_MAX where nothing here is missing. Returns 0 where the engine is
 * stuck. Safe from any thread. */
int mlxdist_come(mlxdist_group* world, const mlxdist_edge* edges, uint64_t count, uint64_t* numbers);

/* Waits until the group has failed: returns 1, and mlxdist_last_error() has the text of the first error. Returns 0 if
 * mlxdist_group_stop_watching, which must come before the group is destroyed, has come before a failure. */
int mlxdist_group_watch_failure(mlxdist_group* group);
void mlxdist_group_stop_watching(mlxdist_group* group);

/* Replaces the table by which algorithms are chosen, while no thread of this rank starts an operation. Must be equal on
 * all ranks: another choice is a mismatch. */
int mlxdist_group_set_tuning(mlxdist_group* group, const mlxdist_tuning* table, uint64_t lines);

/* How many hosts the ranks of the group are on, as options.hosts says. */
int32_t mlxdist_group_hosts(const mlxdist_group* group);

/* The algorithm (mlxdist_algorithm) that `operation` (mlxdist_operation) on such an input uses. */
int32_t mlxdist_group_algorithm(mlxdist_group* group, int32_t operation, const mlxdist_layout* layout);

/* Makes the provider lose or repeat messages, for tests: "drop=1/100", "drop_next=1", "none"
 * (providers/soft/emulation/fault_injection.h); "1:drop=1/1" is for the second link alone. */
int mlxdist_group_inject_faults(mlxdist_group* group, const char* faults);

enum mlxdist_members { MLXDIST_NONE = -1, MLXDIST_ALL = -2 };

/* An operation that a thread hands to another one, which calls it later with this `call`: one of MLX's graphs. It takes
 * its place in the order of its group now, so all ranks must hand theirs over in the same order, and may come to them
 * in any. An operation that has taken its place and will not be called leaves its peers waiting: mlxdist_group_abort.
 *
 * GPU work that waits for its result may be submitted as soon as it is handed over, and macOS ends GPU work that waits
 * for about 5 s. So this rank says that it has come to the operation, and meets the peers where that is due.
 * `to`, `from`: the members that it sends to and receives from, MLXDIST_NONE; both MLXDIST_ALL for a collective.
 *
 * Returns 1 where a meeting is due: options.meet_after seconds have passed since a peer was heard in an operation, a
 * peer was late for one of the last 256, or there were fewer than 256. */
int32_t mlxdist_enqueue(mlxdist_group* group, mlxdist_call* call, int32_t to, int32_t from);

/* In the same thread: waits for the peers, at most `patience` seconds (negative: as long as it takes), and returns 1
 * when that is over; 0 if it is not. `operation`: its name, for notices and errors. A peer that has not come after
 * options.entry_timeout fails the group: the operation then ends with that error. */
int32_t mlxdist_meet(mlxdist_group* group, const char* operation, double patience);

/* The next 256 operations with the members meet: on all of them, after a barrier of the group. */
void mlxdist_expect_late(mlxdist_group* group);

/* macOS has ended GPU work of this rank that waited. Where an operation has stood still for a peer for a second or more
 * within the last minute that is the reason: fails the group with a TIMEOUT that names both. MLXDIST_OK where there was
 * no such operation. */
int mlxdist_group_gpu_timeout(mlxdist_group* group);

/* Promises that `data` stays where it is until mlxdist_unregister: large messages then leave from there, without the
 * copy into a slot. The registration with the device is made on first use and kept. */
int mlxdist_register(mlxdist_group* group, void* data, uint64_t bytes, mlxdist_region** region);

/* Waits until no operation uses the memory. */
void mlxdist_unregister(mlxdist_region* region);

/* Waits at most `timeout` seconds, with 0 not at all, with less until the operation ends (the group's own deadline
 * holds in any case), and returns its status; MLXDIST_TIMEOUT of the wait alone leaves the operation as it is. */
int mlxdist_handle_wait(mlxdist_handle* handle, double timeout);

/* 1 once the operation has ended, well or not. */
int mlxdist_handle_done(mlxdist_handle* handle);

/* Every handle is freed once, before its group is destroyed; an operation that has not ended goes on without it. */
void mlxdist_handle_free(mlxdist_handle* handle);

/* out[i] = in_0[i] op in_1[i] op ... op in_{n-1}[i]. 16-bit floats are accumulated in float32; direct, mesh and tree
 * round once, in rank order; ring and doubling round at each step. Every rank ends with bitwise the same result. */
int mlxdist_all_reduce(mlxdist_group* group, const void* in, void* out, const mlxdist_layout* layout, int32_t op,
                       mlxdist_call* call);

/* out = in_0, in_1, ..., in_{n-1}: size * in bytes. */
int mlxdist_all_gather(mlxdist_group* group, const void* in, void* out, const mlxdist_layout* layout,
                       mlxdist_call* call);

/* Reduces as all_reduce does and leaves the rank-th of `size` equal chunks in `out`. `layout` is that of
 * `in`; its first dimension must be a multiple of the group's size. In place: `out` equals `in`. */
int mlxdist_reduce_scatter(mlxdist_group* group, const void* in, void* out, const mlxdist_layout* layout, int32_t op,
                           mlxdist_call* call);

/* Copies the root's `data` to all ranks' `data`. */
int mlxdist_broadcast(mlxdist_group* group, void* data, const mlxdist_layout* layout, int32_t root, mlxdist_call* call);

/* Reduces as all_reduce does, to the root's `out`; elsewhere `out` is not used. */
int mlxdist_reduce(mlxdist_group* group, const void* in, void* out, const mlxdist_layout* layout, int32_t op,
                   int32_t root, mlxdist_call* call);

/* The root's out = in_0, ..., in_{n-1}; elsewhere `out` is not used. `layout` is that of `in`. */
int mlxdist_gather(mlxdist_group* group, const void* in, void* out, const mlxdist_layout* layout, int32_t root,
                   mlxdist_call* call);

/* out = the rank-th of `size` chunks of the root's `in`, which is not used elsewhere. `layout` is that of `out`. */
int mlxdist_scatter(mlxdist_group* group, const void* in, void* out, const mlxdist_layout* layout, int32_t root,
                    mlxdist_call* call);

/* Part j of rank i's `in` becomes part i of rank j's `out`. `layout` is that of `in` and of `out`; its first
 * dimension must be a multiple of the group's size. `out` may not be `in`. */
int mlxdist_all_to_all(mlxdist_group* group, const void* in, void* out, const mlxdist_layout* layout,
                       mlxdist_call* call);

/* As all_to_all, with chunks of different sizes: send_counts[j] rows go to rank j, receive_counts[i] rows come from
 * rank i, each array of `size` counts; chunks lie one after the other, in rank order. `row` is the layout of one row.
 * What i sends to j must be what j receives from i. `out` may not be `in`. */
int mlxdist_all_to_all_v(mlxdist_group* group, const void* in, const uint64_t* send_counts, void* out,
                         const uint64_t* receive_counts, const mlxdist_layout* row, mlxdist_call* call);

/* Returns once every rank has entered. */
int mlxdist_barrier(mlxdist_group* group, mlxdist_call* call);

/* Point to point, matched in order per pair of ranks. send returns when `data` may be reused. */
int mlxdist_send(mlxdist_group* group, const void* data, const mlxdist_layout* layout, int32_t to, mlxdist_call* call);
int mlxdist_recv(mlxdist_group* group, void* data, const mlxdist_layout* layout, int32_t from, mlxdist_call* call);

/* Both directions at once: cannot deadlock, whatever the sizes. */
int mlxdist_sendrecv(mlxdist_group* group, const void* send, const mlxdist_layout* send_layout, int32_t to, void* recv,
                     const mlxdist_layout* recv_layout, int32_t from, mlxdist_call* call);

/* What the machine itself allows, without messages: half of each round trip, `count` times. A side copies what it
 * sends into the shared array and sets a flag; the other, which polls the flag, copies it out and answers. One round
 * trip more comes first. Two threads that poll need two cores: with one, this takes very long. */
int mlxdist_time_core_transfers(const mlxdist_core_transfer* transfer, double* nanoseconds);

/* cffi ends */

#pragma GCC visibility pop

#ifdef __cplusplus
}
#endif

#endif
