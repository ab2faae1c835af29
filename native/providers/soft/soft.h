/*
 * The software provider's own view of its objects: what all of its files share. Nothing outside this directory includes
 * this file, except the provider's unit tests: users see the verbs table only.
 *
 * The objects of one context are used by one thread at a time; the caller's lock sees to that. Different
 * contexts are independent, and threads of one process may connect theirs to each other.
 */
#pragma once

#include "../providers.h"
#include "addresses.h"
#include "emulation/device_profile.h"
#include "emulation/fault_injection.h"
#include "shared_memory.h"

#include <errno.h>
#include <stdbool.h>

/* What there is room for; a profile may allow less. */
#define SOFT_MAX_PD 64
#define SOFT_MAX_CQ 128
#define SOFT_MAX_CQE (1 << 20)
#define SOFT_MAX_MR 4096
#define SOFT_MAX_SEND_SGE 4
#define SOFT_MAX_RECV_SGE 1
#define SOFT_MAX_MESSAGE (UINT32_C(1) << 30)
#define SOFT_BOUNCE_LISTS 32

/* A piece of the arena. The list is in address order and covers the arena without gaps. */
struct soft_block {
  size_t offset; /* in the segment */
  size_t bytes;
  bool used;
  struct soft_block* next;
};

struct soft_mr {
  struct ibv_mr verbs;
  int access;
  uint32_t number;   /* in the order of registrations */
  uint32_t receives; /* posted into it, and not polled yet */
};

struct soft_pd {
  struct ibv_pd verbs;
  uint32_t number; /* in the order of allocation */
  unsigned users;  /* memory regions and queue pairs */
  uint32_t domain; /* its place at a device that leaks them */
};

struct soft_device {
  struct ibv_device verbs;
  const struct soft_profile* profile;
};

/* How a peer is addressed. */
struct soft_peer_address {
  bool known;
  union ibv_gid gid;
  uint16_t lid;
};

struct soft_context {
  struct ibv_context verbs;
  const struct soft_profile* profile;
  uint32_t host; /* that it pretends to be on */
  struct segment* segment;
  struct soft_block* blocks;
  /* A peer stopped in the middle of a copy and may yet finish it: memory and receive rings are not used again.
   * What is connected goes on; a new connection needs a new context. */
  bool tainted;
  struct soft_mr* mrs[SOFT_MAX_MR];
  uint32_t mr_place; /* all places below it are taken */
  uint32_t mrs_registered;
  uint32_t mr_count; /* now */
  struct soft_qp* qps[SOFT_MAX_QP];
  uint64_t positions[SOFT_MAX_QP]; /* where the receives of each place's next queue pair begin */
  uint32_t qps_created;
  unsigned pds;
  uint32_t pds_allocated;
  unsigned cqs;
  uint32_t held;                   /* SENDs of all queue pairs that were posted and have not left */
  struct soft_addresses addresses; /* in the table of GIDs, behind that of the segment */
  struct soft_tcp* tcp;            /* NULL: no key, no connections to other hosts */
  uint32_t tcp_users;              /* queue pairs that are connected by TCP */
  struct verbs_counters counters;
  struct soft_faults faults;
  struct soft_peer_address single_peer; /* where the device is one cable, and has been connected: its other end */
  struct soft_context* next_used;
  /* Of a program that does not know alloc_memory: receives may be posted into any memory (see bounce.c), and a page is
   * as large as its system says. */
  bool bounces;
  struct soft_bounce* kept_bounces[SOFT_BOUNCE_LISTS];
  struct soft_async* async; /* NULL: no events are requested */
};

/* A completion of the send queue: it waits here to be polled. */
struct soft_send_completion {
  struct soft_qp* qp;
  uint64_t wr_id;
  uint64_t position; /* of the work request: it and all before it have left the send queue, */
  uint64_t frames;   /* number of frames since the queue pair was created or reset */
  enum ibv_wc_status status;
  enum ibv_wc_opcode opcode;
};

/* A completion queue: send completions are kept in a ring, receive completions stay where the peer wrote
 * them until they are polled. */
struct soft_cq {
  struct ibv_cq verbs;
  struct soft_send_completion* sends; /* a ring of verbs.cqe entries */
  uint32_t send_head;
  uint32_t send_count;
  struct soft_qp* receivers[SOFT_MAX_QP]; /* queue pairs whose recv_cq this is */
  unsigned receiver_count;
  unsigned next_receiver; /* polled first next time */
  unsigned users;         /* queue pairs, once for each direction */
  uint64_t demand;        /* work requests that the queue pairs can have outstanding */
  bool overrun;
  int survivors; /* after an overrun: completions that may still be polled */
};

/* A SEND that cannot leave yet: it is late on purpose, or waits for a receive of the peer, or for one before it. */
struct soft_send_wr {
  struct ibv_send_wr verbs; /* its sg_list is the member below */
  struct ibv_sge list[SOFT_MAX_SEND_SGE];
  uint64_t leaves_ns; /* not before; 0: at once */
};

struct soft_receive_wr {
  uint64_t wr_id;
  uint32_t length;
  struct soft_mr* mr; /* NULL if it has no bytes, or a bad key */
};

/* A receive into memory that the peer cannot reach: the peer fills `memory`, and poll_cq copies it. */
struct soft_bounce {
  char* memory;
  size_t bytes;
  void* to;
  struct soft_bounce* next; /* while it is kept */
};

/* The peer's half of a connection, as this sender knows it. */
struct soft_remote {
  struct segment* segment;
  struct shared_queue_pair* shared;
  bool found;      /* the peer's queue pair accepts ours, and the members below are valid */
  uint64_t next;   /* position of the receive for the next message */
  uint64_t posted; /* the peer had posted this many when we last looked */
  uint32_t mask;   /* of its rings */
};

struct soft_qp {
  struct ibv_qp verbs;
  struct ibv_qp_attr attr; /* as set by modify_qp */
  struct ibv_qp_cap cap;
  bool sq_sig_all;
  struct quota_slot* quota_slot; /* at a device that processes share */
  uint32_t last_mr;              /* the number of the last region that was mapped for it */
  uint64_t carried_ns;           /* with the fault `idle`: when it carried something last, */
  bool silent;                   /* and whether that was too long ago */

  struct soft_remote remote;
  struct tcp_sender* tcp; /* instead, if the peer is connected by TCP */
  uint64_t sq_posted;
  uint64_t sq_left;                                             /* of those posted: sent, failed or flushed */
  uint64_t sq_retired;                                          /* their slots in the send queue are free again */
  uint64_t sq_posted_frames, sq_left_frames, sq_retired_frames; /* likewise, where frames are counted */
  uint64_t sq_stuck_frames;  /* of SENDs that never retire, as they were not signaled, or are empty */
  uint32_t sq_crossed;       /* bytes of the first SEND that has not left: its packets before them have */
  struct soft_send_wr* held; /* a ring of those that were posted and have not left */
  uint32_t sq_mask;

  struct shared_queue_pair* shared; /* ours, in our segment */
  struct soft_receive_wr* receives; /* a ring like the shared ones */
  struct soft_bounce** bounces;     /* likewise; NULL until one is needed, and for receives in the arena itself */
  uint32_t rq_mask;
  uint64_t rq_head; /* next receive to complete */
  uint64_t rq_posted;
  uint32_t rq_frames; /* outstanding, where frames are counted */
  uint64_t rq_end;    /* receives from here on are flushed; UINT64_MAX while the peer may send */
};

static inline struct soft_context* soft_context(struct ibv_context* context) { return (struct soft_context*)context; }

/* The index of the address in memory; those of TCP are behind it. */
static inline int soft_memory_gid(const struct soft_context* context) { return context->profile->domain_gid ? 1 : 0; }

static inline struct soft_pd* soft_pd(struct ibv_pd* pd) { return (struct soft_pd*)pd; }

static inline struct soft_mr* soft_mr(struct ibv_mr* mr) { return (struct soft_mr*)mr; }

static inline struct soft_cq* soft_cq(struct ibv_cq* cq) { return (struct soft_cq*)cq; }

static inline struct soft_qp* soft_qp(struct ibv_qp* qp) { return (struct soft_qp*)qp; }

/* Returns an error as the verbs functions do: as their result and in errno. */
static inline int soft_error(int error) {
  if (error) errno = error;
  return error;
}
