/*
 * The binary interface of libibverbs, declared by ourselves, as far as we use it.
 *
 * Providers are opened with dlopen, so neither a header nor a library of rdma-core is needed to build or to
 * run. Names, values and layouts are those of <infiniband/verbs.h>: a provider reads and writes these structs
 * itself, and one wrong size corrupts its queues without an error. Members that only a provider touches
 * keep their place, under names that begin with unused_. Never include this file together with the real header.
 * tests/native/test_verbs_abi.py compares every declaration here with the real header's.
 */
#ifndef MLXDIST_VERBS_VERBS_ABI_H
#define MLXDIST_VERBS_VERBS_ABI_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

struct ibv_ah;
struct ibv_context;
struct ibv_cq;
struct ibv_mw;
struct ibv_qp;
struct ibv_srq;
struct ibv_wc;
struct ibv_send_wr;
struct ibv_recv_wr;

/* Devices and ports */

union ibv_gid {
  uint8_t raw[16];
  struct {
    uint64_t subnet_prefix; /* network byte order */
    uint64_t interface_id;
  } global;
};

enum ibv_gid_type { IBV_GID_TYPE_IB, IBV_GID_TYPE_ROCE_V1, IBV_GID_TYPE_ROCE_V2 };

struct ibv_gid_entry {
  union ibv_gid gid;
  uint32_t gid_index;
  uint32_t port_num;
  uint32_t gid_type; /* enum ibv_gid_type */
  uint32_t ndev_ifindex;
};

enum ibv_node_type {
  IBV_NODE_UNKNOWN = -1,
  IBV_NODE_CA = 1,
  IBV_NODE_SWITCH,
  IBV_NODE_ROUTER,
  IBV_NODE_RNIC,
  IBV_NODE_USNIC,
  IBV_NODE_USNIC_UDP,
  IBV_NODE_UNSPECIFIED,
};

enum ibv_transport_type {
  IBV_TRANSPORT_UNKNOWN = -1,
  IBV_TRANSPORT_UNSPECIFIED = 4,
  IBV_TRANSPORT_THUNDERBOLT = 100, /* in Apple's header only */
};

enum ibv_atomic_cap { IBV_ATOMIC_NONE };

enum ibv_mtu { IBV_MTU_256 = 1, IBV_MTU_512, IBV_MTU_1024, IBV_MTU_2048, IBV_MTU_4096 };

enum ibv_port_state {
  IBV_PORT_NOP,
  IBV_PORT_DOWN,
  IBV_PORT_INIT,
  IBV_PORT_ARMED,
  IBV_PORT_ACTIVE,
  IBV_PORT_ACTIVE_DEFER,
};

enum {
  IBV_LINK_LAYER_UNSPECIFIED,
  IBV_LINK_LAYER_INFINIBAND,
  IBV_LINK_LAYER_ETHERNET,
  IBV_LINK_LAYER_THUNDERBOLT = 100, /* in Apple's header only */
};

struct ibv_device {
  void* (*unused_ops[2])(void);
  enum ibv_node_type node_type;
  enum ibv_transport_type transport_type;
  char name[64];
  char dev_name[64];
  char dev_path[256];
  char ibdev_path[256];
};

struct ibv_device_attr {
  char fw_ver[64];
  uint64_t node_guid; /* network byte order */
  uint64_t sys_image_guid;
  uint64_t max_mr_size;
  uint64_t page_size_cap;
  uint32_t unused_versions[3];
  int max_qp;
  int max_qp_wr;
  unsigned int unused_flags;
  int max_sge;
  int unused_max_sge_rd;
  int max_cq;
  int max_cqe;
  int max_mr;
  int max_pd;
  int unused_atomics[5];
  enum ibv_atomic_cap atomic_cap;
  int unused_limits[11];
  int max_srq;
  int unused_srq[2];
  uint16_t max_pkeys;
  uint8_t unused_delay;
  uint8_t phys_port_cnt;
};

struct ibv_port_attr {
  enum ibv_port_state state;
  enum ibv_mtu max_mtu;
  enum ibv_mtu active_mtu;
  int gid_tbl_len;
  uint32_t unused_flags;
  uint32_t max_msg_sz;
  uint32_t unused_counters[2];
  uint16_t pkey_tbl_len;
  uint16_t lid;
  uint16_t unused_lid;
  uint8_t unused_mask;
  uint8_t max_vl_num;
  uint8_t unused_subnet[3];
  uint8_t active_width;
  uint8_t active_speed;
  uint8_t phys_state;
  uint8_t link_layer;
  uint8_t flags;
  uint16_t port_cap_flags2;
};

/* A context reaches the provider's data path through this table; the other 29 entries are the library's own. */
struct ibv_context_ops {
  void* (*unused_0[11])(void);
  int (*poll_cq)(struct ibv_cq* cq, int num_entries, struct ibv_wc* wc);
  int (*req_notify_cq)(struct ibv_cq* cq, int solicited_only);
  void* (*unused_13[12])(void);
  int (*post_send)(struct ibv_qp* qp, struct ibv_send_wr* wr, struct ibv_send_wr** bad_wr);
  int (*post_recv)(struct ibv_qp* qp, struct ibv_recv_wr* wr, struct ibv_recv_wr** bad_wr);
  void* (*unused_27[5])(void);
};

struct ibv_context {
  struct ibv_device* device;
  struct ibv_context_ops ops;
  int cmd_fd;
  int async_fd;
  int num_comp_vectors;
  pthread_mutex_t mutex;
  void* abi_compat;
};

/* What newer libraries keep in front of a context, where this is what its abi_compat holds. It has grown at its front,
 * and sz counts its bytes: older ones lack the first members. */
#define __VERBS_ABI_IS_EXTENDED ((void*)UINTPTR_MAX)

struct verbs_context {
  int (*query_port)(struct ibv_context* context, uint8_t port_num, struct ibv_port_attr* port_attr,
                    size_t port_attr_len);
  void* unused_1[37];
  uint64_t unused_38;
  size_t sz;
  struct ibv_context context;
};

/* What happens outside any work request */

enum ibv_event_type {
  IBV_EVENT_CQ_ERR,
  IBV_EVENT_QP_FATAL,
  IBV_EVENT_QP_REQ_ERR,
  IBV_EVENT_QP_ACCESS_ERR,
  IBV_EVENT_COMM_EST,
  IBV_EVENT_SQ_DRAINED,
  IBV_EVENT_PATH_MIG,
  IBV_EVENT_PATH_MIG_ERR,
  IBV_EVENT_DEVICE_FATAL,
  IBV_EVENT_PORT_ACTIVE,
  IBV_EVENT_PORT_ERR,
  IBV_EVENT_LID_CHANGE,
  IBV_EVENT_PKEY_CHANGE,
  IBV_EVENT_SM_CHANGE,
  IBV_EVENT_SRQ_ERR,
  IBV_EVENT_SRQ_LIMIT_REACHED,
  IBV_EVENT_QP_LAST_WQE_REACHED,
  IBV_EVENT_CLIENT_REREGISTER,
  IBV_EVENT_GID_CHANGE,
  IBV_EVENT_WQ_FATAL,
};

struct ibv_async_event {
  union {
    struct ibv_cq* cq;
    struct ibv_qp* qp;
    struct ibv_srq* srq;
    int port_num;
  } element;
  enum ibv_event_type event_type;
};

struct ibv_comp_channel {
  struct ibv_context* context;
  int fd;
  int refcnt;
};

/* Memory */

enum ibv_access_flags {
  IBV_ACCESS_LOCAL_WRITE = 1 << 0,
  IBV_ACCESS_REMOTE_WRITE = 1 << 1,
  IBV_ACCESS_REMOTE_READ = 1 << 2,
  IBV_ACCESS_REMOTE_ATOMIC = 1 << 3,
  IBV_ACCESS_RELAXED_ORDERING = 1 << 20,
};

struct ibv_pd {
  struct ibv_context* context;
  uint32_t handle;
};

struct ibv_mr {
  struct ibv_context* context;
  struct ibv_pd* pd;
  void* addr;
  size_t length;
  uint32_t handle;
  uint32_t lkey;
  uint32_t rkey;
};

/* Completions */

enum ibv_wc_status {
  IBV_WC_SUCCESS,
  IBV_WC_LOC_LEN_ERR,
  IBV_WC_LOC_QP_OP_ERR,
  IBV_WC_LOC_EEC_OP_ERR,
  IBV_WC_LOC_PROT_ERR,
  IBV_WC_WR_FLUSH_ERR,
  IBV_WC_MW_BIND_ERR,
  IBV_WC_BAD_RESP_ERR,
  IBV_WC_LOC_ACCESS_ERR,
  IBV_WC_REM_INV_REQ_ERR,
  IBV_WC_REM_ACCESS_ERR,
  IBV_WC_REM_OP_ERR,
  IBV_WC_RETRY_EXC_ERR,
  IBV_WC_RNR_RETRY_EXC_ERR,
  IBV_WC_LOC_RDD_VIOL_ERR,
  IBV_WC_REM_INV_RD_REQ_ERR,
  IBV_WC_REM_ABORT_ERR,
  IBV_WC_INV_EECN_ERR,
  IBV_WC_INV_EEC_STATE_ERR,
  IBV_WC_FATAL_ERR,
  IBV_WC_RESP_TIMEOUT_ERR,
  IBV_WC_GENERAL_ERR,
  IBV_WC_TM_ERR,
  IBV_WC_TM_RNDV_INCOMPLETE,
};

enum ibv_wc_opcode {
  IBV_WC_SEND,
  IBV_WC_RDMA_WRITE,
  IBV_WC_RECV = 1 << 7, /* every opcode of a receive has this bit */
  IBV_WC_RECV_RDMA_WITH_IMM,
};

enum ibv_wc_flags { IBV_WC_WITH_IMM = 1 << 1 };

/* After an error only wr_id, status, vendor_err and qp_num are valid. */
struct ibv_wc {
  uint64_t wr_id;
  enum ibv_wc_status status;
  enum ibv_wc_opcode opcode;
  uint32_t vendor_err;
  uint32_t byte_len;
  union {
    uint32_t imm_data; /* network byte order */
    uint32_t invalidated_rkey;
  };
  uint32_t qp_num;
  uint32_t src_qp;
  unsigned int wc_flags;
  uint16_t unused_pkey_index;
  uint16_t unused_slid;
  uint8_t unused_path[2];
};

struct ibv_cq {
  struct ibv_context* context;
  struct ibv_comp_channel* channel;
  void* cq_context;
  uint32_t handle;
  int cqe;
  pthread_mutex_t mutex;
  pthread_cond_t cond;
  uint32_t comp_events_completed;
  uint32_t async_events_completed;
};

/* Queue pairs */

enum ibv_qp_type { IBV_QPT_RC = 2, IBV_QPT_UC, IBV_QPT_UD };

enum ibv_qp_state {
  IBV_QPS_RESET,
  IBV_QPS_INIT,
  IBV_QPS_RTR,
  IBV_QPS_RTS,
  IBV_QPS_SQD,
  IBV_QPS_SQE,
  IBV_QPS_ERR,
  IBV_QPS_UNKNOWN,
};

enum ibv_qp_attr_mask {
  IBV_QP_STATE = 1 << 0,
  IBV_QP_CUR_STATE = 1 << 1,
  IBV_QP_ACCESS_FLAGS = 1 << 3,
  IBV_QP_PKEY_INDEX = 1 << 4,
  IBV_QP_PORT = 1 << 5,
  IBV_QP_AV = 1 << 7,
  IBV_QP_PATH_MTU = 1 << 8,
  IBV_QP_TIMEOUT = 1 << 9,
  IBV_QP_RETRY_CNT = 1 << 10,
  IBV_QP_RNR_RETRY = 1 << 11,
  IBV_QP_RQ_PSN = 1 << 12,
  IBV_QP_MAX_QP_RD_ATOMIC = 1 << 13,
  IBV_QP_MIN_RNR_TIMER = 1 << 15,
  IBV_QP_SQ_PSN = 1 << 16,
  IBV_QP_MAX_DEST_RD_ATOMIC = 1 << 17,
  IBV_QP_CAP = 1 << 19,
  IBV_QP_DEST_QPN = 1 << 20,
};

struct ibv_global_route {
  union ibv_gid dgid;
  uint32_t flow_label;
  uint8_t sgid_index;
  uint8_t hop_limit;
  uint8_t traffic_class;
};

struct ibv_ah_attr {
  struct ibv_global_route grh;
  uint16_t dlid;
  uint8_t sl;
  uint8_t src_path_bits;
  uint8_t static_rate;
  uint8_t is_global;
  uint8_t port_num;
};

struct ibv_qp_cap {
  uint32_t max_send_wr;
  uint32_t max_recv_wr;
  uint32_t max_send_sge;
  uint32_t max_recv_sge;
  uint32_t max_inline_data;
};

struct ibv_qp_init_attr {
  void* qp_context;
  struct ibv_cq* send_cq;
  struct ibv_cq* recv_cq;
  struct ibv_srq* srq;
  struct ibv_qp_cap cap;
  enum ibv_qp_type qp_type;
  int sq_sig_all;
};

struct ibv_qp_attr {
  enum ibv_qp_state qp_state;
  enum ibv_qp_state cur_qp_state;
  enum ibv_mtu path_mtu;
  uint32_t unused_path[2];
  uint32_t rq_psn;
  uint32_t sq_psn;
  uint32_t dest_qp_num;
  unsigned int qp_access_flags;
  struct ibv_qp_cap cap;
  struct ibv_ah_attr ah_attr;
  struct ibv_ah_attr unused_ah_attr;
  uint16_t pkey_index;
  uint16_t unused_pkey_index;
  uint8_t unused_atomics[4];
  uint8_t min_rnr_timer;
  uint8_t port_num;
  uint8_t timeout;
  uint8_t retry_cnt;
  uint8_t rnr_retry;
  uint8_t unused_alternate[2];
  uint32_t unused_rate_limit;
};

struct ibv_qp {
  struct ibv_context* context;
  void* qp_context;
  struct ibv_pd* pd;
  struct ibv_cq* send_cq;
  struct ibv_cq* recv_cq;
  struct ibv_srq* srq;
  uint32_t handle;
  uint32_t qp_num;
  enum ibv_qp_state state;
  enum ibv_qp_type qp_type;
  pthread_mutex_t mutex;
  pthread_cond_t cond;
  uint32_t events_completed;
};

/* Work requests */

enum ibv_wr_opcode {
  IBV_WR_RDMA_WRITE,
  IBV_WR_RDMA_WRITE_WITH_IMM,
  IBV_WR_SEND,
  IBV_WR_SEND_WITH_IMM,
  IBV_WR_RDMA_READ,
  IBV_WR_ATOMIC_CMP_AND_SWP,
  IBV_WR_ATOMIC_FETCH_AND_ADD,
};

enum ibv_send_flags {
  IBV_SEND_FENCE = 1 << 0,
  IBV_SEND_SIGNALED = 1 << 1,
  IBV_SEND_SOLICITED = 1 << 2,
  IBV_SEND_INLINE = 1 << 3,
  IBV_SEND_IP_CSUM = 1 << 4,
};

struct ibv_sge {
  uint64_t addr;
  uint32_t length;
  uint32_t lkey;
};

struct ibv_send_wr {
  uint64_t wr_id;
  struct ibv_send_wr* next;
  struct ibv_sge* sg_list;
  int num_sge;
  enum ibv_wr_opcode opcode;
  unsigned int send_flags;
  union {
    uint32_t imm_data; /* network byte order */
    uint32_t invalidate_rkey;
  };
  union {
    struct {
      uint64_t remote_addr;
      uint32_t rkey;
    } rdma;
    struct {
      uint64_t remote_addr;
      uint64_t compare_add;
      uint64_t swap;
      uint32_t rkey;
    } atomic;
    struct {
      struct ibv_ah* ah;
      uint32_t remote_qpn;
      uint32_t remote_qkey;
    } ud;
  } wr;
  union {
    struct {
      uint32_t remote_srqn;
    } xrc;
  } qp_type;
  union {
    struct {
      struct ibv_mw* mw;
      uint32_t rkey;
      struct {
        struct ibv_mr* mr;
        uint64_t addr;
        uint64_t length;
        unsigned int mw_access_flags;
      } bind_info;
    } bind_mw;
    struct {
      void* hdr;
      uint16_t hdr_sz;
      uint16_t mss;
    } tso;
  };
};

struct ibv_recv_wr {
  uint64_t wr_id;
  struct ibv_recv_wr* next;
  struct ibv_sge* sg_list;
  int num_sge;
};

#define VERBS_OP(index) ((index) * sizeof(void* (*)(void)))
_Static_assert(offsetof(struct ibv_context_ops, poll_cq) == VERBS_OP(11), "poll_cq is entry 11");
_Static_assert(offsetof(struct ibv_context_ops, post_send) == VERBS_OP(25), "post_send is entry 25");
_Static_assert(offsetof(struct ibv_context_ops, post_recv) == VERBS_OP(26), "post_recv is entry 26");
_Static_assert(sizeof(struct ibv_context_ops) == VERBS_OP(32), "the table has 32 entries");
#undef VERBS_OP
_Static_assert(sizeof(struct ibv_send_wr) == 128, "ibv_send_wr includes the union for bind_mw and tso");
_Static_assert(sizeof(struct ibv_recv_wr) == 32, "size of ibv_recv_wr");
_Static_assert(sizeof(struct ibv_sge) == 16, "size of ibv_sge");
_Static_assert(sizeof(struct ibv_wc) == 48, "size of ibv_wc");
_Static_assert(sizeof(struct ibv_qp_attr) == 144, "size of ibv_qp_attr");
_Static_assert(sizeof(struct ibv_mr) == 48, "size of ibv_mr");

/* Inline in the real header too: no library exports these. */

static inline int ibv_post_send(struct ibv_qp* qp, struct ibv_send_wr* wr, struct ibv_send_wr** bad_wr) {
  return qp->context->ops.post_send(qp, wr, bad_wr);
}

static inline int ibv_post_recv(struct ibv_qp* qp, struct ibv_recv_wr* wr, struct ibv_recv_wr** bad_wr) {
  return qp->context->ops.post_recv(qp, wr, bad_wr);
}

static inline int ibv_req_notify_cq(struct ibv_cq* cq, int solicited_only) {
  return cq->context->ops.req_notify_cq(cq, solicited_only);
}

/* The number of completions written to `wc`, negative on an error of the queue. */
static inline int ibv_poll_cq(struct ibv_cq* cq, int num_entries, struct ibv_wc* wc) {
  return cq->context->ops.poll_cq(cq, num_entries, wc);
}

#endif
