/* One side of a connection over the software provider, for its tests: a context with one of each object. */
#pragma once

#include "../providers/providers.h"

#define SIDE_BYTES ((size_t)1 << 20)
#define SIDE_PSN 0x1234

struct side_options {
  int cqe;
  uint32_t max_send_wr;
  uint32_t max_recv_wr;
  int sq_sig_all;
  const char* profile; /* NULL: ideal */
  uint32_t host;
  int device;
  int access;          /* of the memory; 0: LOCAL_WRITE */
  const uint8_t* key;  /* NULL: by shared memory; else by TCP over the loopback interface, */
  const char* address; /* or over the one that has this address */
};

struct side {
  struct ibv_context* context;
  struct ibv_pd* pd;
  struct ibv_cq* cq;
  struct ibv_qp* qp;
  char* memory; /* SIDE_BYTES from alloc_memory, zeroed */
  struct ibv_mr* mr;
  union ibv_gid gid;
  uint16_t lid;
  uint8_t gid_index;
};

/* What a side tells the other over a side channel. */
struct side_address {
  union ibv_gid gid;
  uint32_t qp_num;
  uint16_t lid;
  uint8_t gid_index; /* the one to use for one's own side, too */
};

#define SIDE_DEFAULTS ((struct side_options){.cqe = 64, .max_send_wr = 8, .max_recv_wr = 8})

struct ibv_context* side_open_device(void); /* ideal */
struct ibv_context* side_open_context(struct side_options options);
void side_open(struct side* side, struct side_options options);
void side_close(struct side* side); /* checks that everything can be destroyed */
void side_open_pair(struct side* a, struct side* b, struct side_options options); /* in one process, connected */
void side_close_pair(struct side* a, struct side* b);
struct ibv_qp* side_create_qp(struct side* side, struct side_options options);
struct side_address side_address(const struct side* side);

#define INIT_MASK (IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS)
#define RTR_MASK (IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN)
#define RTS_MASK (IBV_QP_STATE | IBV_QP_SQ_PSN)

/* Attributes that suit the step to `state`, towards `peer` where it matters. */
struct ibv_qp_attr side_attr(enum ibv_qp_state state, struct side_address peer);
int side_mask(enum ibv_qp_state state);
int side_modify(struct ibv_qp* qp, enum ibv_qp_state state, struct side_address peer); /* errno value */
void side_to_rts(struct ibv_qp* qp, struct side_address peer);
void side_connect(struct side* a, struct side* b); /* from RESET to RTS */
enum ibv_qp_state side_state(struct ibv_qp* qp);   /* by query_qp */

/* One work request on bytes [offset, offset + length) of the side's memory. Return an errno value. */
int side_send(struct side* side, uint64_t wr_id, size_t offset, size_t length, unsigned send_flags);
int side_receive(struct side* side, uint64_t wr_id, size_t offset, size_t length);

/* Exactly `count` completions; fails the test if they do not come, or more do. */
void side_poll(struct side* side, struct ibv_wc* wc, int count);
/* One completion, which must have this wr_id and status. */
struct ibv_wc side_poll_one(struct side* side, uint64_t wr_id, enum ibv_wc_status status);
struct verbs_counters side_counters(const struct side* side);

/* Bytes that differ from place to place and from seed to seed. */
void side_fill(char* memory, size_t length, unsigned seed);
void side_verify(const char* memory, size_t length, unsigned seed);
