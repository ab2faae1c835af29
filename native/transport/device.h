/* A device that messages leave through. The engine sees it through the verbs table only. */
#pragma once

#include "verbs.h"

#include <stdbool.h>

/* Access flags of memory regions and queue pairs. Which of them a device takes is found by trying (device.c). */
enum {
  ACCESS_LOCAL = IBV_ACCESS_LOCAL_WRITE,
  ACCESS_REMOTE = ACCESS_LOCAL | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE
};

struct device {
  const struct verbs* verbs;
  char name[64];
  struct ibv_context* context;
  struct ibv_pd* pd;
  struct ibv_cq* cq;
  struct ibv_port_attr port;
  int region_access, queue_pair_access; /* flags that it takes (device.c); 0: not known yet */
  uint32_t queue_pairs, regions;        /* that were made, reconnects included, */
  uint32_t refused;                     /* and objects that it would not destroy */
  uint32_t link;                        /* which one it is to the first rank that it serves */
  bool gathers;                         /* a send may be put together from two places */
  bool whole_frames;                    /* a send must have as many frames as the receive that it meets, */
  uint32_t max_frames;                  /* that a queue takes */
  bool reports_length; /* byte_len of a receive's completion counts; else every message is as long as its slot */
  bool signals_all;    /* every send is to be signaled */
};

/* Opens the provider's device of that name. `key`: of the job, NULL if there is none. `host`: that it plays, where it
 * can. */
int device_open(struct device* device, const struct verbs* verbs, const char* name, const uint8_t* key, uint32_t host);

/* The address with that index in the device's table. */
int device_gid(const struct device* device, int32_t index, union ibv_gid* gid);

/* The index of the software provider's address in memory; -1: another provider's device has none. */
int32_t device_memory_gid(const struct device* device);

/* Whether messages may be posted: Apple's library crashes in a post on a port whose cable was pulled. */
bool device_is_up(const struct device* device);

/* Memory for messages: registered after the queue pairs that use it are created and before they go to RTR, where
 * Apple's provider maps it. NULL with the text of mlxdist_last_error(). Goes after the queue pairs. */
struct ibv_mr* device_register(struct device* device, void* memory, uint64_t bytes);
void device_deregister(struct device* device, struct ibv_mr* mr);

/* NULL with errno; EBUSY: the device has no more. Never goes to ERR before it is destroyed: after that Apple's provider
 * fails to unmap regions. 0 or an errno value. */
struct ibv_qp* device_create_qp(struct device* device, struct ibv_qp_init_attr* init);
int device_destroy_qp(struct device* device, struct ibv_qp* qp);

/* From RESET to INIT. */
int device_init_qp(struct device* device, struct ibv_qp* qp);

/* `entries`: completions that can be outstanding. */
int device_create_cq(struct device* device, int entries);
/* When its queue pairs and regions are gone. */
void device_close(struct device* device);

/* Fails with what `error` means for this verb. */
int device_fail_verb(const struct device* device, const char* verb, int error);
