/* One end of a connection, as a program sets it up that was written against <infiniband/verbs.h> and nothing else. */
#pragma once

#include <infiniband/verbs.h>

#include <stddef.h>
#include <stdint.h>

#define PORT 1
#define PSN 0x4321
#define DEPTH 8 /* of both queues of a queue pair */
#define BYTES ((size_t)1 << 19)
#define IMMEDIATE 0xfeedbeef
#define ACCESS (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE)

/* Of messages: what is odd, and what is around a page. */
#define SIZES 8
static const size_t sizes[SIZES] = {0, 1, 3, 17, 4095, 4096, 4097, 65537};

struct end {
  struct ibv_context* context;
  struct ibv_pd* pd;
  struct ibv_cq* cq;
  struct ibv_qp* qp; /* in INIT at first */
  struct ibv_mr* mr; /* of `memory` */
  char* memory;
  int gid_index; /* by which it is found; 0 at first */
};

/* What one end has to know of the other. */
struct address {
  union ibv_gid gid;
  int gid_index; /* in its table, and in that of the other end */
  uint32_t qp_num;
  uint32_t rkey;
  uint64_t memory;
};

struct ibv_context* open_device(void); /* the first */
struct end open_end(char* memory, size_t bytes, int cqe, int sq_sig_all);
void close_end(struct end* end); /* checks that everything can be destroyed */
struct ibv_qp* create_qp(struct end* end, int sq_sig_all);
struct address address_of(const struct end* end);
void to_init(struct ibv_qp* qp);
int to_rtr(struct ibv_qp* qp, const struct address* peer); /* what ibv_modify_qp returns */
void to_rts(struct ibv_qp* qp, const struct address* peer);
void join(struct end* a, struct end* b);
void open_pair(struct end* a, struct end* b); /* with memory from malloc, connected, all sends signaled */
void close_pair(struct end* a, struct end* b);
enum ibv_qp_state state_of(struct ibv_qp* qp); /* by ibv_query_qp */

/* Bytes that differ from place to place and from seed to seed. */
void fill(char* memory, size_t bytes, unsigned seed);
void verify(const char* memory, size_t bytes, unsigned seed);

/* One work request each; they return what posting returned. */
int receive(struct end* end, uint64_t id, size_t offset, size_t bytes);
int receive_at(struct end* end, uint64_t id, char* to, size_t bytes, uint32_t lkey);
int send_bytes(struct end* end, uint64_t id, size_t bytes);
/* From the beginning of the end's memory to `remote` of the peer's, where it is a write. */
int post(struct end* end, enum ibv_wr_opcode opcode, uint64_t id, size_t bytes, const struct address* peer,
         size_t remote);
struct ibv_send_wr request(struct end* end, struct ibv_sge* sge, enum ibv_wr_opcode opcode, uint64_t id, size_t bytes,
                           const struct address* peer, size_t remote);

/* The next completion, which must have this wr_id and status. */
struct ibv_wc poll_one(struct end* end, uint64_t id, enum ibv_wc_status status);
void expect_nothing(struct end* end);
