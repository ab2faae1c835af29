/*
 * The software provider's own view of its objects. Nothing outside this directory includes this file, except
 * the provider's unit tests: users see the verbs table only.
 *
 * The objects of one context are used by one thread at a time; the caller's lock sees to that. Different
 * contexts are independent, and threads of one process may connect theirs to each other.
 */
#pragma once

#include "../providers.h"
#include "addresses.h"
#include "fault_injection.h"
#include "device_profile.h"
#include "quota.h"
#include "shared_memory.h"

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
  uint64_t sq_stuck_frames;  /* of SENDs that never retire, as they were not signaled */
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

static inline struct soft_pd* soft_pd(struct ibv_pd* pd) { return (struct soft_pd*)pd; }

static inline struct soft_mr* soft_mr(struct ibv_mr* mr) { return (struct soft_mr*)mr; }

static inline struct soft_cq* soft_cq(struct ibv_cq* cq) { return (struct soft_cq*)cq; }

static inline struct soft_qp* soft_qp(struct ibv_qp* qp) { return (struct soft_qp*)qp; }

/* Returns an error as the verbs functions do: as their result and in errno. */
int soft_error(int error);
uint64_t soft_clock_ns(void);

/* memory.c */
int soft_arena_create(struct soft_context* context);
void soft_arena_destroy(struct soft_context* context);
size_t soft_whole_pages(size_t bytes);
void* soft_alloc_memory(struct ibv_context* context, size_t bytes);
void soft_free_memory(struct ibv_context* context, void* memory, size_t bytes);
struct ibv_mr* soft_reg_mr(struct ibv_pd* pd, void* addr, size_t length, int access);
int soft_dereg_mr(struct ibv_mr* mr);
/* The region of `pd` that `lkey` names, if it contains the range and allows `access`; or NULL. */
struct soft_mr* soft_find_mr(const struct ibv_pd* pd, uint32_t lkey, uint64_t addr, uint64_t length, int access);
/* Whether the range lies in memory that peers can reach. */
bool soft_in_arena(const struct soft_context* context, uint64_t addr, uint64_t length);

/* completion_queue.c */
struct ibv_cq* soft_create_cq(struct ibv_context* context, int cqe, void* cq_context, struct ibv_comp_channel* channel,
                              int comp_vector);
int soft_destroy_cq(struct ibv_cq* cq);
int soft_poll_cq(struct ibv_cq* cq, int num_entries, struct ibv_wc* wc);
void soft_cq_attach(struct soft_qp* qp);
void soft_cq_detach(struct soft_qp* qp);
void soft_cq_add(struct soft_qp* qp, const struct ibv_send_wr* wr, enum ibv_wc_status status);
/* Forgets the completions of a queue pair that is reset or destroyed. */
void soft_cq_discard(struct soft_qp* qp);

/* queue_pair.c */
struct ibv_qp* soft_create_qp(struct ibv_pd* pd, struct ibv_qp_init_attr* attr);
int soft_modify_qp(struct ibv_qp* qp, struct ibv_qp_attr* attr, int attr_mask);
int soft_query_qp(struct ibv_qp* qp, struct ibv_qp_attr* attr, int attr_mask, struct ibv_qp_init_attr* init_attr);
int soft_destroy_qp(struct ibv_qp* qp);
void soft_qp_fail(struct soft_qp* qp); /* to the state ERR */
/* Removes the segment's name, where it has one, once the peers of all queue pairs have mapped it. New peers cannot find
 * the segment then: queue pairs that are to be connected later must have been created before. */
void soft_remove_name(struct soft_context* context);
/* Waits for a peer in the middle of a copy; false if it was not `done` in time. */
bool soft_wait_for_copy(bool (*done)(const void* copy), const void* copy);

/* write.c */
static inline bool soft_is_write(enum ibv_wr_opcode opcode) {
  return opcode == IBV_WR_RDMA_WRITE || opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
}

/* false: it was dropped, as a key, a range or the access is wrong, or there is no receive for its immediate data. */
bool soft_write(struct soft_qp* qp, const struct ibv_send_wr* wr, enum ibv_wc_status* status);
void soft_publish_region(const struct soft_mr* mr);
/* After this no peer writes to the region: EBUSY if one was stopped in the middle of it. */
int soft_withdraw_region(const struct soft_mr* mr);
/* After this no peer writes through the queue pair, whose claim is closed; false if one was stopped in the middle. */
bool soft_wait_for_writers(const struct shared_queue_pair* shared);

/* bounce.c */
/* Memory for the next receive of the queue pair. EINVAL: the context has none; ENOMEM: the arena is full. */
int soft_bounce_reserve(struct soft_qp* qp, uint32_t length);
/* The address to publish for a receive into `sge`: in the arena. */
uint64_t soft_bounce_post(struct soft_qp* qp, const struct ibv_sge* sge);
void soft_bounce_take(struct soft_qp* qp, const struct ibv_wc* wc);
/* Without a copy. */
void soft_bounce_drop(struct soft_qp* qp, uint64_t position);
/* Gives those that no receive has back to the arena. */
void soft_bounce_empty(struct soft_context* context);

/* async.c */
/* From now on the context's async_fd is readable when there is an event. 0 or an errno value. */
int soft_async_start(struct soft_context* context);
void soft_async_stop(struct soft_context* context);
void soft_async_raise(struct soft_context* context, struct ibv_async_event event);
int soft_async_get(struct soft_context* context, struct ibv_async_event* event); /* -1 with errno, as the library */
void soft_async_acknowledge(struct soft_context* context, const struct ibv_async_event* event);
/* Before the queue or queue pair is destroyed: forgets its events, and waits for those that were taken to be
 * acknowledged. */
void soft_async_settle(struct soft_context* context, const void* element);

/* single_peer.c: devices that are the end of one cable */
/* False if this process uses the device in another context too, as the same host, and may not. */
bool soft_single_peer_claim(struct soft_context* context);
void soft_single_peer_release(struct soft_context* context);
/* Before and after a queue pair is connected: ETIMEDOUT if the peer is not at the other end. */
int soft_single_peer_check(const struct soft_context* context, const struct ibv_ah_attr* peer);
void soft_single_peer_connect(struct soft_context* context, const struct ibv_ah_attr* peer);

/* domains.c: protection domains of a device that leaks them */
/* One of `max_pd`; 0, ENOMEM if all are taken, or what went wrong. */
int soft_domain_take(const struct soft_context* context, uint32_t* domain);
void soft_domain_return(const struct soft_context* context, uint32_t domain);

/* idle.c: the fault of that name */
void soft_idle_begin(struct soft_context* context);
void soft_idle_carried(struct soft_qp* qp);
bool soft_idle_is_silent(struct soft_qp* qp);

/* work_queue.c */
/* Whether the peer's queue pair is ready for us; if so, what is known of it is valid. */
bool soft_find_peer(struct soft_qp* qp);
/* Takes the peer's next posted receive; false if there is none, or no queue pair that accepts the message. */
bool soft_claim_receive(struct soft_qp* qp, uint64_t* position);
/* `length` bytes of the message, to `to`. */
void soft_copy_message(char* to, const struct ibv_send_wr* wr, uint32_t length);
int soft_post_send(struct ibv_qp* qp, struct ibv_send_wr* wr, struct ibv_send_wr** bad_wr);
int soft_post_recv(struct ibv_qp* qp, struct ibv_recv_wr* wr, struct ibv_recv_wr** bad_wr);
void soft_send_held(struct soft_context* context); /* those that may leave by now */
void soft_flush_held(struct soft_qp* qp);          /* in the state ERR: all */
void soft_forget_held(struct soft_qp* qp);         /* without completions */
