/*
 * The software provider: the verbs without hardware. Between processes of one host a SEND is one copy by the sender,
 * straight into the buffer that the peer has posted; see shared_memory.h. Between hosts it goes by TCP; see tcp.h.
 */
#define _POSIX_C_SOURCE 200809L
#include "soft.h"

#include "async.h"
#include "completion_queue.h"
#include "emulation/domains.h"
#include "emulation/idle.h"
#include "emulation/single_peer.h"
#include "memory.h"
#include "queue_pair.h"
#include "tcp.h"
#include "work_queue.h"

#include <arpa/inet.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct soft_device devices[SOFT_PROFILES][SOFT_DEVICES];
static pthread_once_t named = PTHREAD_ONCE_INIT;

static void name_devices(void) {
  for (int profile = 0; profile < SOFT_PROFILES; profile++)
    for (int i = 0; i < SOFT_DEVICES; i++) {
      struct soft_device *device = &devices[profile][i];
      device->profile = &soft_profiles[profile];
      device->verbs.node_type = IBV_NODE_UNSPECIFIED;
      device->verbs.transport_type = IBV_TRANSPORT_UNSPECIFIED;
      snprintf(device->verbs.name, sizeof device->verbs.name, "soft%d", i);
      snprintf(device->verbs.dev_name, sizeof device->verbs.dev_name, "soft%d", i);
    }
}

static struct ibv_device **list_devices(enum soft_profiles profile, int *num_devices) {
  pthread_once(&named, name_devices);
  int count = soft_profiles[profile].devices;
  struct ibv_device **list = calloc((size_t)count + 1, sizeof *list);
  for (int i = 0; list && i < count; i++) list[i] = &devices[profile][i].verbs;
  if (num_devices) *num_devices = list ? count : 0;
  return list;
}

#define LIST(name, profile)                                                                                            \
  static struct ibv_device **name(int *num_devices) { return list_devices(profile, num_devices); }
LIST(list_ideal, SOFT_IDEAL)
LIST(list_apple_tb5, SOFT_APPLE_TB5)
LIST(list_apple_tb5_26_2, SOFT_APPLE_TB5_26_2)
LIST(list_apple_tb5_27, SOFT_APPLE_TB5_27)
LIST(list_apple_odd, SOFT_APPLE_ODD)
LIST(list_rxe, SOFT_RXE)

static void free_device_list(struct ibv_device **list) { free(list); }

static const char *get_device_name(struct ibv_device *of) { return of->name; }

static const struct soft_profile *profile_of(const struct ibv_device *device) {
  for (int profile = 0; profile < SOFT_PROFILES; profile++)
    for (int i = 0; i < soft_profiles[profile].devices; i++)
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
  soft_addresses_read(&context->addresses);
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
  soft_single_peer_release(context);
  soft_tcp_close(context);
  segment_close(context->segment);
  segment_release(context->segment);
  soft_arena_destroy(context);
  soft_async_stop(context);
  free(context);
  return 0;
}

static int query_device(struct ibv_context *context, struct ibv_device_attr *attr) {
  const struct soft_profile *profile = soft_context(context)->profile;
  *attr = (struct ibv_device_attr){
      .fw_ver = "soft",
      .max_mr_size = profile->max_mr_size ? profile->max_mr_size : UINT64_MAX,
      .page_size_cap = SEGMENT_PAGE,
      .max_qp = (int)profile->max_qp,
      .max_qp_wr = (int)profile->max_wr,
      .max_sge = (int)profile->max_send_sge,
      .max_cq = (int)profile->max_cq,
      .max_cqe = (int)profile->max_cqe,
      .max_mr = (int)profile->max_mr,
      .max_pd = (int)profile->max_pd,
      .max_pkeys = 1,
      .phys_port_cnt = 1,
  };
  return 0;
}

static int query_port(struct ibv_context *context, uint8_t port, struct ibv_port_attr *attr) {
  if (port != 1) return soft_error(EINVAL);
  const struct soft_context *soft = soft_context(context);
  const struct soft_profile *profile = soft->profile;
  bool down = soft->faults.link_down;
  *attr = (struct ibv_port_attr){
      .state = down ? IBV_PORT_DOWN : IBV_PORT_ACTIVE,
      .max_mtu = IBV_MTU_4096,
      .active_mtu = profile->active_mtu,
      .gid_tbl_len = soft_memory_gid(soft) + 1 + soft->addresses.count,
      .max_msg_sz = soft_max_receive(profile), /* what librdma's table says, too: see verbs/apple.h */
      .pkey_tbl_len = 1,
      .lid = soft->tcp ? ntohs(soft->tcp->port) : 0, /* where peers of other hosts connect to */
      .max_vl_num = 1,
      .active_width = 1,
      .active_speed = 1,
      .phys_state = down ? 2 : 5, /* Polling, LinkUp */
      /* As with RoCE, a peer is addressed by its GID. */
      .link_layer = profile->frames ? IBV_LINK_LAYER_THUNDERBOLT : IBV_LINK_LAYER_ETHERNET,
  };
  return 0;
}

static bool is_gid(const struct soft_context *context, uint8_t port, int index) {
  return port == 1 && index >= 0 && index <= soft_memory_gid(context) + context->addresses.count;
}

/* Any bytes but those of an address; they begin like a global one of IPv6, as one in eight does. */
static union ibv_gid domain_uuid(const struct soft_context *context) {
  union ibv_gid gid = context->segment->gid;
  gid.raw[0] = 0x3c;
  return gid;
}

static int query_gid(struct ibv_context *verbs, uint8_t port, int index, union ibv_gid *gid) {
  const struct soft_context *context = soft_context(verbs);
  int memory = soft_memory_gid(context);
  if (!is_gid(context, port, index)) {
    errno = EINVAL;
    return -1; /* as the library does */
  }
  if (index < memory)
    *gid = domain_uuid(context);
  else if (index == memory)
    *gid = context->segment->gid;
  else
    soft_address_to_gid(context->addresses.list[index - memory - 1], gid);
  return 0;
}

static int query_gid_type(struct ibv_context *context, uint8_t port, int index, enum verbs_gid_type *type) {
  int memory = soft_memory_gid(soft_context(context));
  if (!is_gid(soft_context(context), port, index)) return soft_error(EINVAL);
  *type = index < memory ? VERBS_GID_UNKNOWN : index == memory ? VERBS_GID_MEMORY : VERBS_GID_TCP;
  return 0;
}

/* ENOMEM: the device has no more. EBUSY: this process has opened it twice, where that is not allowed; earlier it is not
 * known which host the context emulates. */
static struct ibv_pd *alloc_pd(struct ibv_context *verbs) {
  struct soft_context *context = soft_context(verbs);
  int error = context->pds == context->profile->max_pd ? ENOMEM : 0;
  if (!error && !soft_single_peer_claim(context)) error = EBUSY;
  if (error) {
    errno = error;
    return NULL;
  }
  struct soft_pd *pd = calloc(1, sizeof *pd);
  if (!pd) return NULL;
  if (context->profile->leaks_domains && (error = soft_domain_take(context, &pd->domain))) {
    free(pd);
    errno = error;
    return NULL;
  }
  pd->verbs.context = verbs;
  pd->number = ++context->pds_allocated;
  context->pds++;
  return &pd->verbs;
}

/* EBUSY while there are regions or queue pairs of it; with the strict order, completion queues too. */
static int dealloc_pd(struct ibv_pd *pd) {
  struct soft_context *context = soft_context(pd->context);
  if (soft_pd(pd)->users || (context->profile->strict_order && context->cqs)) return soft_error(EBUSY);
  if (context->profile->leaks_domains) soft_domain_return(context, soft_pd(pd)->domain);
  context->pds--;
  free(pd);
  return 0;
}

static void read_counters(struct ibv_context *context, struct verbs_counters *counters) {
  *counters = soft_context(context)->counters;
}

static int inject(struct ibv_context *context, const char *faults) {
  struct soft_faults *set = &soft_context(context)->faults;
  bool was_down = set->link_down;
  uint32_t idle_ms = set->idle_ms;
  int error = soft_faults_set(set, faults);
  if (set->idle_ms != idle_ms) soft_idle_begin(soft_context(context));
  if (set->link_down != was_down && soft_context(context)->async)
    soft_async_raise(soft_context(context),
                     (struct ibv_async_event){{.port_num = 1}, was_down ? IBV_EVENT_PORT_ACTIVE : IBV_EVENT_PORT_ERR});
  return soft_error(error);
}

static void set_virtual_host(struct ibv_context *context, uint32_t host) { soft_context(context)->host = host; }

static bool is_by_memory(const struct ibv_qp *qp) { return !((const struct soft_qp *)qp)->tcp; }

#define TABLE(label, freely, list)                                                                                     \
  {                                                                                                                    \
      .name = (label),                                                                                                 \
      .registers_freely = (freely),                                                                                    \
      .get_device_list = (list),                                                                                       \
      .free_device_list = free_device_list,                                                                            \
      .get_device_name = get_device_name,                                                                              \
      .open_device = open_device,                                                                                      \
      .close_device = close_device,                                                                                    \
      .query_device = query_device,                                                                                    \
      .query_port = query_port,                                                                                        \
      .query_gid = query_gid,                                                                                          \
      .query_gid_type = query_gid_type,                                                                                \
      .alloc_pd = alloc_pd,                                                                                            \
      .dealloc_pd = dealloc_pd,                                                                                        \
      .reg_mr = soft_reg_mr,                                                                                           \
      .dereg_mr = soft_dereg_mr,                                                                                       \
      .create_cq = soft_create_cq,                                                                                     \
      .destroy_cq = soft_destroy_cq,                                                                                   \
      .create_qp = soft_create_qp,                                                                                     \
      .modify_qp = soft_modify_qp,                                                                                     \
      .query_qp = soft_query_qp,                                                                                       \
      .destroy_qp = soft_destroy_qp,                                                                                   \
      .alloc_memory = soft_alloc_memory,                                                                               \
      .free_memory = soft_free_memory,                                                                                 \
      .read_counters = read_counters,                                                                                  \
      .inject = inject,                                                                                                \
      .set_virtual_host = set_virtual_host,                                                                            \
      .set_key = soft_tcp_set_key,                                                                                     \
      .connect_error = soft_tcp_error,                                                                                 \
      .is_by_memory = is_by_memory,                                                                                    \
  }

static const struct verbs tables[SOFT_PROFILES] = {
    [SOFT_IDEAL] = TABLE("soft", true, list_ideal),
    [SOFT_APPLE_TB5] = TABLE("soft/apple-tb5", false, list_apple_tb5),
    [SOFT_APPLE_TB5_26_2] = TABLE("soft/apple-tb5-26.2", false, list_apple_tb5_26_2),
    [SOFT_APPLE_TB5_27] = TABLE("soft/apple-tb5-27", false, list_apple_tb5_27),
    [SOFT_APPLE_ODD] = TABLE("soft/apple-odd", false, list_apple_odd),
    [SOFT_RXE] = TABLE("soft/rxe", false, list_rxe),
};

const struct verbs *verbs_soft(void) { return &tables[SOFT_IDEAL]; }

const struct verbs *verbs_soft_profile(const char *name) {
  for (int profile = 0; profile < SOFT_PROFILES; profile++)
    if (strcmp(name, soft_profiles[profile].name) == 0) return &tables[profile];
  return NULL;
}
