/*
 * The memory that a device context shares with its peers, and the layout both sides agree on.
 *
 * A segment holds a header, one shared_queue_pair for every queue pair of the context, and an arena
 * for alloc_memory. The owner posts receives into its own segment; a peer maps the segment and plays the
 * network adapter: it takes the next receive, copies its message there and writes a completion.
 *
 * A connection has one sender, so both rings have a single producer and a single consumer. Positions are
 * counts that never repeat during the life of the segment, not even over RESET or a new queue pair, so no
 * stale entry and no stale sender can be taken for a present one. Everything turns on the word `claim`:
 *
 *   owner, at RTR            claim = position of the first receive
 *   sender                   sees a receive posted at n, then claim: n -> n + 1 (compare and swap),
 *                            copies, writes completion n with sequence n + 1 last
 *   owner, leaving RTR/RTS   exchanges claim for CLAIM_CLOSED: from then on every compare and swap fails,
 *                            and the old value says which completion to wait for. When that has arrived,
 *                            no peer writes into the posted buffers any more, and they may be reused.
 */
#pragma once

#include "../../verbs/verbs_abi.h"

#include <stdalign.h>
#include <stdatomic.h>
#include <stdbool.h>

/* Address space, not memory: pages are committed when first written. A group of 8 ranks needs 28 MiB of
 * slabs; the rest is room for registered buffers. */
#define SEGMENT_BYTES ((size_t)256 << 20)
#define SEGMENT_MAGIC UINT64_C(0x747369642d786c6d) /* "mlx-dist" in memory */
#define SEGMENT_VERSION 4 /* of the layout below; processes with different versions do not connect */

/* Apple's pages. Segments are mapped, and memory is given out, on such boundaries on every system. */
#define SEGMENT_PAGE 16384u

#define SOFT_MAX_QP 64
#define SOFT_MAX_WR 4096 /* the 4095 that Apple's devices allow, as a power of two */

/* Apple's cache lines have 128 bytes, and x86 fetches its 64-byte lines in pairs. */
#define CACHE_LINE 128

#define CLAIM_CLOSED (UINT64_C(1) << 63)

struct segment_header {
  _Atomic uint64_t magic; /* written behind what is known from the beginning */
  uint64_t cookie;        /* random: a process id or a descriptor that was reused is not taken for the owner */
  uint64_t bytes;
  uint32_t version;
  uint32_t profile; /* enum soft_profiles: both sides play the same device */
  uint64_t base;    /* where the owner has mapped it */
  _Atomic uint32_t closed;
  _Atomic uint32_t place; /* see struct segment */
};

/* A memory region that peers may write to with RDMA_WRITE, at the place that its key names. The owner empties the place
 * and waits for the writers of its queue pairs before it uses it again, so an entry whose key fits is valid. */
struct shared_region {
  _Atomic uint32_t key; /* 0: none */
  uint32_t pd;          /* the number of its protection domain */
  uint64_t addr;        /* in the owner's memory */
  uint64_t length;
  uint64_t offset; /* in the segment, or REGION_OUTSIDE */
};

#define SEGMENT_REGIONS 4096
#define REGION_OUTSIDE UINT64_MAX

/* A posted receive. A message completes it with `status`, which is not SUCCESS if its key was bad. A line of its
 * own: posting one receive would otherwise take its neighbour, which is next, out of the sender's cache. */
struct shared_receive {
  alignas(64) uint64_t offset; /* in the segment */
  uint32_t length;
  uint32_t status; /* enum ibv_wc_status */
};

struct shared_completion {
  alignas(64) _Atomic uint64_t sequence; /* position + 1, written last */
  uint32_t status;                       /* enum ibv_wc_status */
  uint32_t byte_len;
  uint32_t imm_data;
  uint32_t wc_flags; /* enum ibv_wc_flags, and */
};

#define COMPLETED_BY_WRITE (UINT32_C(1) << 31) /* an RDMA_WRITE_WITH_IMM, which leaves the buffer alone */
#define COMPLETED_IN_PART (UINT32_C(1) << 30)  /* a packet of a SEND, of which more are to come */

/* Completes the receive at `position`, for the process that acts as its network adapter. `imm_data` counts if the flags
 * say so. */
static inline void shared_complete(struct shared_completion* completion, uint64_t position, uint32_t status,
                                   uint32_t byte_len, uint32_t wc_flags, uint32_t imm_data) {
  completion->status = status;
  completion->byte_len = byte_len;
  completion->imm_data = wc_flags & IBV_WC_WITH_IMM ? imm_data : 0;
  completion->wc_flags = wc_flags;
  atomic_store_explicit(&completion->sequence, position + 1, memory_order_release);
}

struct shared_queue_pair {
  /* Written by the owner while the claim is closed. */
  alignas(CACHE_LINE) _Atomic uint32_t qp_num; /* 0: no queue pair */
  _Atomic uint32_t ring_size;                  /* entries in use of the two rings, a power of two */
  _Atomic uint64_t peer_cookie;                /* the only sender that may claim: its segment, */
  _Atomic uint32_t peer_qp_num;                /* its queue pair */
  _Atomic uint32_t rq_psn;                     /* and its first packet number */
  _Atomic uint32_t attached;                   /* set by the peer: it has mapped this segment */
  _Atomic uint32_t pd;                         /* the number of its protection domain */
  _Atomic uint32_t access;                     /* enum ibv_access_flags that the peer has */

  alignas(CACHE_LINE) _Atomic uint64_t claim;  /* next receive to take, or CLAIM_CLOSED */
  alignas(CACHE_LINE) _Atomic uint64_t posted; /* receives below this position are posted */
  /* The peer, around an RDMA_WRITE: low half, those in progress; high half, those that have ended. Counted before the
   * claim is looked at, so an owner that has closed the claim, and waited for them, is alone. */
  alignas(CACHE_LINE) _Atomic uint64_t writers;

  /* This struct's size is no multiple of 4096 on purpose: heads of rings that are polled in turn would
   * otherwise share one set of the first-level cache. */
  alignas(CACHE_LINE) struct shared_receive receives[SOFT_MAX_WR];
  struct shared_completion completions[SOFT_MAX_WR];
};

_Static_assert(sizeof(struct shared_completion) == 64, "a completion is one cache line on x86");
_Static_assert(sizeof(struct shared_queue_pair) % 4096 != 0, "see receives");
_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2, "atomics in shared memory must be lock-free");

struct segment_layout {
  struct segment_header header;
  struct shared_region regions[SEGMENT_REGIONS];
  struct shared_queue_pair queue_pairs[SOFT_MAX_QP];
};

#define ARENA_OFFSET ((sizeof(struct segment_layout) + SEGMENT_PAGE - 1) / SEGMENT_PAGE * SEGMENT_PAGE)

/* A mapping of this process, of its own or of a peer's segment; every segment is mapped at most once. */
struct segment {
  struct segment_layout* layout; /* NULL in a child that this process forked */
  union ibv_gid gid;             /* how peers find it */
  uint64_t cookie;
  bool owned;
  uint32_t place; /* of those with a number that its process owns: the lowest that was free, from 1; else 0 */
  bool named;     /* there is a name to remove */
  int fd;         /* what peers open, or -1 */
  int memory_fd;  /* of a peer's: see segment_memory; or -1 */
  /* Where a writer looks regions up: the peer's in its segment. Those of this process are kept in its own memory as
   * well, as their addresses are used here, and peers could change the others. */
  struct shared_region* regions;
  unsigned references;
  struct segment* next;
};

/* A new segment for this process. Returns 0 or an errno value, as do all functions below. */
int segment_create(struct segment** segment);

/* The segment at `gid`. ENOENT, ESRCH or EACCES: there is none, its owner is gone, or it belongs to another
 * user; EINVAL: something else is there. */
int segment_open(const union ibv_gid* gid, struct segment** segment);

/* Gives this process's own segment a number of 28 bits, for addresses that are too short for a GID; EMFILE: there is
 * none left. For programs that use libsoftverbs: a process that uses libmlxdist too has segments of both. */
int segment_enumerate(struct segment* segment);

/* The GID of the segment of this user that has the number. ENOENT or EACCES: there is none. */
int segment_find(uint32_t number, union ibv_gid* gid);
#define SEGMENT_NUMBERS (UINT32_C(1) << 28)

/* How GIDs of segments begin: as link-local addresses, like the first one of a RoCE device. */
static const uint8_t segment_prefix[2] = {0xfe, 0x80};

/* Ends the owner's use: no process can open the segment from now on. Peers keep their mappings. */
void segment_close(struct segment* segment);

/* Gives back what segment_create or segment_open returned. */
void segment_release(struct segment* segment);

/* A descriptor at which the memory of the owner, another process, can be written; it does not outlive that process, as
 * the number of a process may. -1 with errno set where that is not permitted, or there is no such thing. */
int segment_memory(struct segment* segment);
