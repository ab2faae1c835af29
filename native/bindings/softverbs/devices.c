/* Devices, ports and addresses. */
#include "provider.h"

#include "../../providers/soft/async.h"
#include "../../providers/soft/completion_queue.h"
#include "../../providers/soft/queue_pair.h"
#include "../../providers/soft/regions.h"
#include "../../providers/soft/shared_memory_system.h"
#include "../../providers/soft/work_queue.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define OUI UINT64_C(0x02736f) /* locally administered */
#define DEFAULT_PKEY 0xffff
#define GIDS 2

/* The provider as SOFTVERBS_PROFILE wants it; NULL, and a line on stderr, if it wants something unknown: a program only
 * sees a list of no devices. */
static const struct verbs *soft(void) {
  const char *profile = getenv("SOFTVERBS_PROFILE");
  if (!profile || !*profile) profile = "ideal";
  const struct verbs *verbs = verbs_soft_profile(profile);
  if (verbs) return verbs;
  fprintf(stderr, "libsoftverbs: SOFTVERBS_PROFILE=%s is none of its profiles, which are", profile);
  for (int i = 0; i < SOFT_PROFILES; i++) fprintf(stderr, " %s", soft_profiles[i].name);
  fprintf(stderr, "\n");
  return NULL;
}

struct ibv_device **ibv_get_device_list(int *num_devices) {
  const struct verbs *verbs = soft();
  if (num_devices) *num_devices = 0;
  if (verbs) return verbs->get_device_list(num_devices);
  errno = EINVAL;
  return NULL;
}

void ibv_free_device_list(struct ibv_device **list) { free(list); }

const char *ibv_get_device_name(struct ibv_device *device) { return device->name; }

int ibv_get_device_index(struct ibv_device *device) {
  return (int)strtol(device->name + strcspn(device->name, "0123456789"), NULL, 10);
}

/* The same on every host, as nothing here is a serial number. */
uint64_t ibv_get_device_guid(struct ibv_device *device) {
  uint64_t guid = OUI << 40 | UINT64_C(0xfffe) << 24 | (uint64_t)ibv_get_device_index(device);
  return (uint64_t)htonl((uint32_t)(guid >> 32)) | (uint64_t)htonl((uint32_t)guid) << 32;
}

/* The data path goes through the lock, too. */

static int poll_cq(struct ibv_cq *cq, int num_entries, struct ibv_wc *wc) {
  return LOCKED(cq->context, soft_poll_cq(cq, num_entries, wc));
}

static int post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad_wr) {
  return LOCKED(qp->context, soft_post_send(qp, wr, bad_wr));
}

static int post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad_wr) {
  return LOCKED(qp->context, soft_post_recv(qp, wr, bad_wr));
}

/* There is no channel that the notification could go to. */
static int req_notify_cq(struct ibv_cq *cq, int solicited_only) {
  (void)cq, (void)solicited_only;
  return soft_error(EOPNOTSUPP);
}

static int set_virtual_host(struct ibv_context *context, const char *number) {
  char *end;
  unsigned long host = strtoul(number, &end, 10);
  if (*number < '0' || *number > '9' || *end || host > UINT32_MAX) {
    fprintf(stderr, "libsoftverbs: SOFTVERBS_HOST=%s is no number below 2^32\n", number);
    return EINVAL;
  }
  verbs_of(context)->set_virtual_host(context, (uint32_t)host);
  return 0;
}

static int prepare(struct ibv_context *context) {
  const char *host = getenv("SOFTVERBS_HOST");
  if (host && set_virtual_host(context, host)) return EINVAL;
  const char *faults = getenv("SOFTVERBS_FAULTS");
  if (faults && verbs_of(context)->inject(context, faults)) {
    fprintf(stderr, "libsoftverbs: SOFTVERBS_FAULTS=%s is not a list of faults: see docs/softverbs.md\n", faults);
    return EINVAL;
  }
  int error = segment_enumerate(soft_context(context)->segment);
  if (error) return error;
  context->ops.poll_cq = poll_cq;
  context->ops.post_send = post_send;
  context->ops.post_recv = post_recv;
  context->ops.req_notify_cq = req_notify_cq;
  soft_context(context)->bounces = true;
  pthread_mutex_init(&context->mutex, NULL);
  return soft_async_start(soft_context(context));
}

struct ibv_context *ibv_open_device(struct ibv_device *device) {
  const struct verbs *verbs = soft();
  if (!verbs) {
    errno = EINVAL;
    return NULL;
  }
  struct ibv_context *context = verbs->open_device(device);
  int error = context ? prepare(context) : 0;
  if (!error) return context;
  verbs->close_device(context);
  errno = error;
  return NULL;
}

/* Ends what the program has left open, without an error, as the real library does. The memory of its objects leaks. */
int ibv_close_device(struct ibv_context *context) {
  struct soft_context *soft = soft_context(context);
  for (int i = 0; i < SOFT_MAX_QP; i++)
    if (soft->qps[i]) soft_destroy_qp(&soft->qps[i]->verbs);
  for (int i = 0; i < SOFT_MAX_MR; i++)
    if (soft->mrs[i]) soft_withdraw_region(soft->mrs[i]);
  soft->pds = soft->cqs = 0;
  return verbs_of(context)->close_device(context);
}

int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *attr) {
  int error = verbs_of(context)->query_device(context, attr);
  attr->node_guid = attr->sys_image_guid = ibv_get_device_guid(context->device);
  return error;
}

/* The header's inline function hands over a struct that ends before port_cap_flags2, and has cleared it. */
int ibv_query_port(struct ibv_context *context, uint8_t port, struct ibv_port_attr *attr) {
  struct ibv_port_attr whole;
  int error = LOCKED(context, verbs_of(context)->query_port(context, port, &whole));
  whole.gid_tbl_len = GIDS;
  if (!error) memcpy(attr, &whole, offsetof(struct ibv_port_attr, port_cap_flags2));
  return error;
}

/* The second address of a device is an IPv4 one, as programs look for and RoCE v2 and Thunderbolt have. It is in
 * 240.0.0.0/4, which no interface has, and stands for the memory of this context; for other hosts a context would need
 * a key. */
#define FIRST_ADDRESS UINT32_C(0xf0000000) /* 240.0.0.0 */

int find_address(const struct ibv_context *context, struct ibv_ah_attr *peer) {
  struct in_addr address;
  if (peer->grh.sgid_index > 1) return EINVAL;
  peer->grh.sgid_index = (uint8_t)soft_memory_gid((const struct soft_context *)context);
  if (!soft_address_from_gid(&peer->grh.dgid, &address)) return 0;
  if (ntohl(address.s_addr) < FIRST_ADDRESS) return ENOENT;
  return segment_find(ntohl(address.s_addr) - FIRST_ADDRESS, &peer->grh.dgid);
}

/* As a RoCE device has them: link-local, then IPv4. */
int ibv_query_gid(struct ibv_context *context, uint8_t port, int index, union ibv_gid *gid) {
  if (index < 0 || index >= GIDS) {
    errno = EINVAL;
    return -1;
  }
  if (verbs_of(context)->query_gid(context, port, soft_memory_gid(soft_context(context)), gid)) return -1;
  struct in_addr address = {htonl(FIRST_ADDRESS + segment_number(soft_context(context)->segment))};
  if (index == 1) soft_address_to_gid(address, gid);
  return 0;
}

int _ibv_query_gid_ex(struct ibv_context *context, uint32_t port, uint32_t index, struct ibv_gid_entry *entry,
                      uint32_t flags, size_t entry_size) {
  if (flags || entry_size < sizeof *entry || port > UINT8_MAX || index > INT32_MAX) return EINVAL;
  *entry = (struct ibv_gid_entry){
      .gid_index = index, .port_num = port, .gid_type = index ? IBV_GID_TYPE_ROCE_V2 : IBV_GID_TYPE_ROCE_V1};
  return ibv_query_gid(context, (uint8_t)port, (int)index, &entry->gid) ? ENODATA : 0;
}

int ibv_query_gid_type(struct ibv_context *context, uint8_t port, unsigned int index, unsigned int *type) {
  struct ibv_gid_entry entry;
  int error = _ibv_query_gid_ex(context, port, index, &entry, 0, sizeof entry);
  if (!error) *type = entry.gid_type == IBV_GID_TYPE_ROCE_V2;
  if (error) errno = error;
  return error ? -1 : 0;
}

ssize_t _ibv_query_gid_table(struct ibv_context *context, struct ibv_gid_entry *entries, size_t max_entries,
                             uint32_t flags, size_t entry_size) {
  if (max_entries < GIDS) return -EINVAL; /* they would not all fit */
  int error = 0;
  for (uint32_t index = 0; !error && index < GIDS; index++)
    error = _ibv_query_gid_ex(context, 1, index, &entries[index], flags, entry_size);
  return error ? -error : GIDS;
}

int ibv_query_pkey(struct ibv_context *context, uint8_t port, int index, uint16_t *pkey) {
  (void)context;
  if (port != 1 || index != 0) return soft_error(EINVAL);
  *pkey = DEFAULT_PKEY;
  return 0;
}

int ibv_get_pkey_index(struct ibv_context *context, uint8_t port, uint16_t pkey) {
  (void)context;
  if (port == 1 && pkey == DEFAULT_PKEY) return 0;
  errno = EINVAL;
  return -1;
}

/* A child has none of its parent's queue pairs, and nothing is pinned that copy on write could take from the parent. */
int ibv_fork_init(void) { return 0; }

int ibv_is_fork_initialized(void) { return 2; /* IBV_FORK_UNNEEDED */ }

int softverbs_inject(struct ibv_context *context, const char *faults) {
  return LOCKED(context, verbs_of(context)->inject(context, faults));
}
