/*
 * The software provider: the verbs without hardware, between processes of one host. A SEND is one copy by
 * the sender, straight into the buffer that the peer has posted; see segment.h.
 */
#include "soft.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

int soft_error(int error) {
  if (error) errno = error;
  return error;
}

#define DEVICE(label, of)                              \
  {                                                    \
    .verbs =                                           \
        {                                              \
            .node_type = IBV_NODE_UNSPECIFIED,         \
            .transport_type = IBV_TRANSPORT_UNSPECIFIED, \
            .name = label,                             \
            .dev_name = label,                         \
        },                                             \
    .profile = &soft_profiles[of],                     \
  }

/* Two, so that a pair of ranks can be joined by two cables. */
#define DEVICES 2
static struct soft_device devices[SOFT_PROFILES][DEVICES] = {
    {DEVICE("soft0", SOFT_IDEAL), DEVICE("soft1", SOFT_IDEAL)},
    {DEVICE("soft0", SOFT_APPLE_TB5), DEVICE("soft1", SOFT_APPLE_TB5)},
    {DEVICE("soft0", SOFT_RXE), DEVICE("soft1", SOFT_RXE)},
};

static struct ibv_device **list_devices(enum soft_profiles profile, int *num_devices) {
  struct ibv_device **list = calloc(DEVICES + 1, sizeof *list);
  for (int i = 0; list && i < DEVICES; i++) list[i] = &devices[profile][i].verbs;
  if (num_devices) *num_devices = list ? DEVICES : 0;
  return list;
}

static struct ibv_device **list_ideal(int *num_devices) {
  return list_devices(SOFT_IDEAL, num_devices);
}

static struct ibv_device **list_apple_tb5(int *num_devices) {
  return list_devices(SOFT_APPLE_TB5, num_devices);
}

static struct ibv_device **list_rxe(int *num_devices) {
  return list_devices(SOFT_RXE, num_devices);
}

static void free_device_list(struct ibv_device **list) {
  free(list);
}

static const char *get_device_name(struct ibv_device *of) {
  return of->name;
}

static const struct soft_profile *profile_of(const struct ibv_device *device) {
  for (int profile = 0; profile < SOFT_PROFILES; profile++)
    for (int i = 0; i < DEVICES; i++)
      if (device == &devices[profile][i].verbs) return devices[profile][i].profile;
  return NULL;
}

static struct ibv_context *open_device(struct ibv_device *of) {
  struct soft_context *context = calloc(1, sizeof *context);
  if (!context) return NULL;
  context->profile = profile_of(of);
  int error = context->profile ? segment_create(&context->segment) : ENODEV;
  if (!error && (error = soft_arena_create(context))) {
    segment_close(context->segment);
    segment_release(context->segment);
  }
  if (error) {
    free(context);
    errno = error;
    return NULL;
  }
  context->segment->layout->header.profile = (uint32_t)(context->profile - soft_profiles);
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
  const struct soft_profile *profile = soft_context(context)->profile;
  *attr = (struct ibv_device_attr){
      .fw_ver = "soft",
      .max_mr_size = UINT64_MAX,
      .page_size_cap = SEGMENT_PAGE,
      .max_qp = (int)profile->max_qp,
      .max_qp_wr = (int)profile->max_wr,
      .max_sge = (int)profile->max_send_sge,
      .max_cq = (int)profile->max_cq,
      .max_cqe = (int)profile->max_cqe,
      .max_mr = (int)profile->max_mr,
      .max_pd = (int)profile->max_pd,
      .atomic_cap = IBV_ATOMIC_NONE,
      .max_pkeys = 1,
      .phys_port_cnt = 1,
  };
  return 0;
}

static int query_port(struct ibv_context *context, uint8_t port, struct ibv_port_attr *attr) {
  if (port != 1) return soft_error(EINVAL);
  const struct soft_profile *profile = soft_context(context)->profile;
  bool down = soft_context(context)->faults.link_down;
  *attr = (struct ibv_port_attr){
      .state = down ? IBV_PORT_DOWN : IBV_PORT_ACTIVE,
      .max_mtu = IBV_MTU_4096,
      .active_mtu = profile->active_mtu,
      .gid_tbl_len = 1,
      .max_msg_sz = profile->max_message,
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
  if (context->pds == context->profile->max_pd) {
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

static void pose_as_host(struct ibv_context *context, uint32_t host) {
  soft_context(context)->host = host;
}

#define TABLE(label, freely, frames, list) \
  {                                        \
    .name = label,                         \
    .registers_freely = freely,            \
    .whole_frames = frames,                \
    .get_device_list = list,               \
    .free_device_list = free_device_list,  \
    .get_device_name = get_device_name,    \
    .open_device = open_device,            \
    .close_device = close_device,          \
    .query_device = query_device,          \
    .query_port = query_port,              \
    .query_gid = query_gid,                \
    .alloc_pd = alloc_pd,                  \
    .dealloc_pd = dealloc_pd,              \
    .reg_mr = soft_reg_mr,                 \
    .dereg_mr = soft_dereg_mr,             \
    .create_cq = soft_create_cq,           \
    .destroy_cq = soft_destroy_cq,         \
    .create_qp = soft_create_qp,           \
    .modify_qp = soft_modify_qp,           \
    .query_qp = soft_query_qp,             \
    .destroy_qp = soft_destroy_qp,         \
    .alloc_memory = soft_alloc_memory,     \
    .free_memory = soft_free_memory,       \
    .read_counters = read_counters,        \
    .inject = inject,                      \
    .pose_as_host = pose_as_host,          \
  }

static const struct verbs tables[SOFT_PROFILES] = {
    [SOFT_IDEAL] = TABLE("soft", true, false, list_ideal),
    [SOFT_APPLE_TB5] = TABLE("soft/apple-tb5", false, true, list_apple_tb5),
    [SOFT_RXE] = TABLE("soft/rxe", false, false, list_rxe),
};

const struct verbs *verbs_soft(void) {
  return &tables[SOFT_IDEAL];
}

const struct verbs *verbs_soft_profile(const char *name) {
  for (int profile = 0; profile < SOFT_PROFILES; profile++)
    if (strcmp(name, soft_profiles[profile].name) == 0) return &tables[profile];
  return NULL;
}
