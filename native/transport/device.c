#include "device.h"

#include "debug.h"
#include "error.h"
#include "explain.h"
#include "mlxdist.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

int device_fail_verb(const struct device *device, const char *verb, int error) {
  char text[VERBS_EXPLANATION_BYTES];
  verbs_explain(verb, error, text, sizeof text);
  return fail(MLXDIST_RESOURCES, "device %s of provider %s: %s failed: %s", device->name, device->verbs->name, verb,
              text);
}

/* The context of the device of that name, or NULL with errno. */
static struct ibv_context *open_by_name(const struct verbs *verbs, const char *name) {
  int devices = 0;
  struct ibv_context *context = 0;
  int error = ENODEV;
  struct ibv_device **list = verbs->get_device_list(&devices);
  if (!list) return 0;
  for (int i = 0; i < devices; i++) {
    if (strcmp(verbs->get_device_name(list[i]), name) != 0) continue;
    context = verbs->open_device(list[i]);
    error = errno;
    break;
  }
  verbs->free_device_list(list);
  errno = error;
  return context;
}

int device_open(struct device *device, const struct verbs *verbs, const char *name, const uint8_t *key, uint32_t host) {
  device->verbs = verbs;
  snprintf(device->name, sizeof device->name, "%s", name);
  device->context = open_by_name(verbs, name);
  if (!device->context && errno == ENODEV)
    return fail(MLXDIST_RESOURCES, "provider %s has no device %s; `mlxdist devices` lists those that there are",
                verbs->name, name);
  if (!device->context) return device_fail_verb(device, "open_device", errno);
  if (verbs->set_virtual_host) verbs->set_virtual_host(device->context, host);
  int error = key && verbs->set_key ? verbs->set_key(device->context, key) : 0;
  if (error)
    return fail(MLXDIST_RESOURCES, "device %s of provider %s cannot listen for other hosts: %s", name, verbs->name,
                strerror(error));
  struct ibv_device_attr attributes;
  error = verbs->query_device(device->context, &attributes);
  if (error) return device_fail_verb(device, "query_device", error);
  error = verbs->query_port(device->context, 1, &device->port);
  if (error) return device_fail_verb(device, "query_port", error);
  if (device->port.state != IBV_PORT_ACTIVE)
    return fail(MLXDIST_RESOURCES,
                "port 1 of device %s of provider %s is down; check the cable, and that the "
                "interface is up at both ends",
                name, verbs->name);
  device->gathers = attributes.max_sge >= 2;
  device->whole_frames = device->port.link_layer == IBV_LINK_LAYER_THUNDERBOLT;
  /* On Thunderbolt no program that is known to work reads byte_len, or leaves a send without a completion. */
  device->reports_length = !device->whole_frames;
  device->signals_all = device->whole_frames;
  device->max_frames = (uint32_t)attributes.max_qp_wr;
  device->pd = verbs->alloc_pd(device->context);
  return device->pd ? MLXDIST_OK : device_fail_verb(device, "alloc_pd", errno);
}

int device_gid(const struct device *device, int32_t index, union ibv_gid *gid) {
  static const union ibv_gid none;
  if (device->verbs->query_gid(device->context, 1, index, gid) == 0 && memcmp(gid, &none, sizeof none) != 0)
    return MLXDIST_OK;
  return fail(MLXDIST_RESOURCES, "device %s of provider %s has no address with index %d; `mlxdist devices` lists them",
              device->name, device->verbs->name, index);
}

int32_t device_memory_gid(const struct device *device) {
  enum verbs_gid_type type;
  for (int32_t index = 0; index < device->port.gid_tbl_len; index++)
    if (device->verbs->query_gid_type(device->context, 1, index, &type) == 0 && type == VERBS_GID_MEMORY) return index;
  return -1;
}

int device_create_cq(struct device *device, int entries) {
  device->cq = device->verbs->create_cq(device->context, entries, 0, 0, 0);
  return device->cq ? MLXDIST_OK : device_fail_verb(device, "create_cq", errno);
}

bool device_is_up(const struct device *device) {
  struct ibv_port_attr port;
  return device->verbs->query_port(device->context, 1, &port) == 0 && port.state == IBV_PORT_ACTIVE;
}

/*
 * Access flags of memory regions and queue pairs: what a device takes is found by trying.
 *
 * Peers never read or write this memory themselves, so LOCAL_WRITE is all that is needed, and Apple's technote names no
 * more. But JACCL, llama.cpp and ds4, which run there, use remote access as well, and llama.cpp found LOCAL_WRITE alone
 * rejected. How a provider rejects flags differs, and some give no reason: so any error leads to the next flags.
 */

/* What the first flags failed with matters most: they are those that the device is expected to take. */
static int fail_both(const struct device *device, const char *verb, const int *flags, const int *errors) {
  char first[VERBS_EXPLANATION_BYTES], second[VERBS_EXPLANATION_BYTES];
  verbs_explain(verb, errors[0], first, sizeof first);
  verbs_explain("", errors[1], second, sizeof second);
  return fail(MLXDIST_RESOURCES,
              "device %s of provider %s: %s failed with access flags 0x%x and 0x%x; with 0x%x: %s; "
              "with 0x%x: %s",
              device->name, device->verbs->name, verb, flags[0], flags[1], flags[1], second, flags[0], first);
}

/* Calls the verb with these flags. False, with the error in errno, or 0 there if the provider gives none. */
typedef bool access_attempt(void *context, int access);

/* Whether `attempt` succeeds with `*found`, or, where that is 0, with either kind of flags, which `*found` then is. An
 * error names what was tried. */
static int find_access_flags(const struct device *device, const char *verb, access_attempt *attempt, void *context,
                             int *found) {
  const int flags[] = {device->whole_frames ? ACCESS_REMOTE : ACCESS_LOCAL,
                       device->whole_frames ? ACCESS_LOCAL : ACCESS_REMOTE};
  int errors[2];
  if (*found) {
    errno = 0;
    return attempt(context, *found) ? MLXDIST_OK : device_fail_verb(device, verb, errno);
  }
  for (int i = 0; i < 2; i++) {
    errno = 0; /* what an earlier call left there is no reason for this one */
    if (attempt(context, flags[i])) {
      *found = flags[i];
      debug(DEBUG_INFO, "connection", "device %s: %s with access flags 0x%x", device->name, verb, flags[i]);
      return MLXDIST_OK;
    }
    errors[i] = errno;
  }
  return fail_both(device, verb, flags, errors);
}

struct registration {
  struct device *device;
  void *memory;
  uint64_t bytes;
  struct ibv_mr *mr;
};

static bool attempt_registration(void *context, int access) {
  struct registration *to = context;
  to->mr = to->device->verbs->reg_mr(to->device->pd, to->memory, to->bytes, access);
  return to->mr;
}

struct ibv_mr *device_register(struct device *device, void *memory, uint64_t bytes) {
  struct registration registration = {.device = device, .memory = memory, .bytes = bytes};
  if (find_access_flags(device, "reg_mr", attempt_registration, &registration, &device->region_access)) return 0;
  device->regions++;
  return registration.mr;
}

struct initialization {
  struct device *device;
  struct ibv_qp *qp;
};

static bool attempt_initialization(void *context, int access) {
  const struct initialization *of = context;
  struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = (unsigned)access};
  int mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
  int error = of->device->verbs->modify_qp(of->qp, &attr, mask);
  if (error && error != -1) errno = error; /* else the reason is in errno, if there is one */
  return !error;
}

int device_init_qp(struct device *device, struct ibv_qp *qp) {
  struct initialization initialization = {.device = device, .qp = qp};
  return find_access_flags(device, "modify_qp to INIT", attempt_initialization, &initialization,
                           &device->queue_pair_access);
}

struct ibv_qp *device_create_qp(struct device *device, struct ibv_qp_init_attr *init) {
  struct ibv_qp *qp = device->verbs->create_qp(device->pd, init);
  if (qp) device->queue_pairs++;
  return qp;
}

/* What is not given back costs the machine one of few objects, on Apple's until the next start. */
static int note_refusal(struct device *device, const char *verb, int error) {
  if (!error) return 0;
  device->refused++;
  debug(DEBUG_WARN, "connection", "device %s: %s was refused: %s", device->name, verb, strerror(error));
  return error;
}

void device_deregister(struct device *device, struct ibv_mr *mr) {
  note_refusal(device, "dereg_mr", device->verbs->dereg_mr(mr));
}

int device_destroy_qp(struct device *device, struct ibv_qp *qp) {
  return note_refusal(device, "destroy_qp", device->verbs->destroy_qp(qp));
}

void device_close(struct device *device) {
  const struct verbs *verbs = device->verbs;
  if (device->cq) note_refusal(device, "destroy_cq", verbs->destroy_cq(device->cq));
  if (device->pd) note_refusal(device, "dealloc_pd", verbs->dealloc_pd(device->pd));
  if (device->context) note_refusal(device, "close_device", verbs->close_device(device->context));
  debug(DEBUG_INFO, "connection",
        "device %s is closed: first its queue pairs (%u), then regions (%u), completion "
        "queue and domain; refused: %u",
        device->name, device->queue_pairs, device->regions, device->refused);
  *device = (struct device){0};
}
