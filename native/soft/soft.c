/*
 * The software provider: the verbs without hardware, between processes of one host. A SEND is one copy by
 * the sender, straight into the buffer that the peer has posted; see segment.h.
 */
#include "soft.h"

#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

int soft_error(int error) {
  if (error) errno = error;
  return error;
}

#define DEVICE(label)                                  \
  {                                                    \
    .node_type = IBV_NODE_UNSPECIFIED,                 \
    .transport_type = IBV_TRANSPORT_UNSPECIFIED,       \
    .name = label,                                     \
    .dev_name = label,                                 \
  }

/* Two, so that a pair of ranks can be joined by two cables. */
static struct ibv_device devices[] = {DEVICE("soft0"), DEVICE("soft1")};
#define DEVICES ((int)(sizeof devices / sizeof *devices))

static struct ibv_device **get_device_list(int *num_devices) {
  struct ibv_device **list = calloc(DEVICES + 1, sizeof *list);
  for (int i = 0; list && i < DEVICES; i++) list[i] = &devices[i];
  if (num_devices) *num_devices = list ? DEVICES : 0;
  return list;
}

static void free_device_list(struct ibv_device **list) {
  free(list);
}

static const char *get_device_name(struct ibv_device *of) {
  return of->name;
}

static struct ibv_context *open_device(struct ibv_device *of) {
  struct soft_context *context = calloc(1, sizeof *context);
  if (!context) return NULL;
  int error = of >= devices && of < devices + DEVICES ? segment_create(&context->segment) : ENODEV;
  if (!error && (error = soft_arena_create(context))) {
    segment_close(context->segment);
    segment_release(context->segment);
  }
  if (error) {
    free(context);
    errno = error;
    return NULL;
  }
  context->verbs.device = of;
  context->verbs.ops.poll_cq = soft_poll_cq;
  context->verbs.ops.post_send = soft_post_send;
  context->verbs.ops.post_recv = soft_post_recv;
  context->verbs.cmd_fd = -1;
  context->verbs.async_fd = -1;
  context->verbs.num_comp_vectors = 1;
  return &context->verbs;
}

/* EBUSY while a protection domain or a completion queue is left, and with them any queue pair or region. */
static int close_device(struct ibv_context *verbs) {
  struct soft_context *context = soft_context(verbs);
  if (context->pds || context->cqs) return soft_error(EBUSY);
  segment_close(context->segment);
  segment_release(context->segment);
  soft_arena_destroy(context);
  free(context);
  return 0;
}

static int query_device(struct ibv_context *context, struct ibv_device_attr *attr) {
  (void)context;
  *attr = (struct ibv_device_attr){
      .fw_ver = "soft",
      .max_mr_size = UINT64_MAX,
      .page_size_cap = (uint64_t)sysconf(_SC_PAGESIZE),
      .max_qp = SOFT_MAX_QP,
      .max_qp_wr = SOFT_MAX_WR,
      .max_sge = SOFT_MAX_SEND_SGE,
      .max_cq = SOFT_MAX_CQ,
      .max_cqe = SOFT_MAX_CQE,
      .max_mr = SOFT_MAX_MR,
      .max_pd = SOFT_MAX_PD,
      .atomic_cap = IBV_ATOMIC_NONE,
      .max_pkeys = 1,
      .phys_port_cnt = 1,
  };
  return 0;
}

static int query_port(struct ibv_context *context, uint8_t port, struct ibv_port_attr *attr) {
  if (port != 1) return soft_error(EINVAL);
  bool down = soft_context(context)->faults.link_down;
  *attr = (struct ibv_port_attr){
      .state = down ? IBV_PORT_DOWN : IBV_PORT_ACTIVE,
      .max_mtu = IBV_MTU_4096,
      .active_mtu = IBV_MTU_4096,
      .gid_tbl_len = 1,
      .max_msg_sz = SOFT_MAX_MESSAGE,
      .pkey_tbl_len = 1,
      .max_vl_num = 1,
      .active_width = 1,
      .active_speed = 1,
      .phys_state = down ? 2 : 5, /* Polling, LinkUp */
      .link_layer = IBV_LINK_LAYER_ETHERNET, /* as with RoCE, a peer is addressed by its GID alone */
  };
  return 0;
}

static int query_gid(struct ibv_context *context, uint8_t port, int index, union ibv_gid *gid) {
  if (port != 1 || index != 0) {
    errno = EINVAL;
    return -1; /* as the library does */
  }
  *gid = soft_context(context)->segment->gid;
  return 0;
}

static struct ibv_pd *alloc_pd(struct ibv_context *verbs) {
  struct soft_context *context = soft_context(verbs);
  if (context->pds == SOFT_MAX_PD) {
    errno = ENOMEM;
    return NULL;
  }
  struct soft_pd *pd = calloc(1, sizeof *pd);
  if (!pd) return NULL;
  pd->verbs.context = verbs;
  context->pds++;
  return &pd->verbs;
}

static int dealloc_pd(struct ibv_pd *pd) {
  if (soft_pd(pd)->users) return soft_error(EBUSY);
  soft_context(pd->context)->pds--;
  free(pd);
  return 0;
}

static void read_counters(struct ibv_context *context, struct verbs_counters *counters) {
  *counters = soft_context(context)->counters;
}

static int inject(struct ibv_context *context, const char *faults) {
  return soft_error(soft_faults_set(&soft_context(context)->faults, faults));
}

static const struct verbs soft = {
    .name = "soft",
    .reason = "all ranks are on one host",
    .registers_freely = true,
    .get_device_list = get_device_list,
    .free_device_list = free_device_list,
    .get_device_name = get_device_name,
    .open_device = open_device,
    .close_device = close_device,
    .query_device = query_device,
    .query_port = query_port,
    .query_gid = query_gid,
    .alloc_pd = alloc_pd,
    .dealloc_pd = dealloc_pd,
    .reg_mr = soft_reg_mr,
    .dereg_mr = soft_dereg_mr,
    .create_cq = soft_create_cq,
    .destroy_cq = soft_destroy_cq,
    .create_qp = soft_create_qp,
    .modify_qp = soft_modify_qp,
    .query_qp = soft_query_qp,
    .destroy_qp = soft_destroy_qp,
    .alloc_memory = soft_alloc_memory,
    .free_memory = soft_free_memory,
    .read_counters = read_counters,
    .inject = inject,
};

const struct verbs *verbs_soft(void) {
  return &soft;
}
