/*
 * The one table through which everything above this directory sees RDMA.
 *
 * A provider fills it: `soft` (compiled in), libibverbs and Apple's librdma (opened with dlopen).
 * The functions have the names, arguments and results of <infiniband/verbs.h> without the prefix ibv_.
 * post_send, post_recv and poll_cq are not in the table: as in the real library they are reached through
 * context->ops (ibv_post_send and its two siblings below), because that is where real providers put them.
 */
#pragma once

#include "verbs_abi.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* What an address in a port's table is good for. */
enum verbs_gid_type {
  VERBS_GID_IB,      /* InfiniBand */
  VERBS_GID_ROCE_V1, /* RDMA over Ethernet frames: does not leave the segment */
  VERBS_GID_ROCE_V2, /* over UDP */
  VERBS_GID_UNKNOWN, /* the provider does not say: Thunderbolt */
  VERBS_GID_MEMORY,  /* soft: processes of this host, through shared memory */
  VERBS_GID_TCP,     /* soft: other hosts */
};

/* Ranks of a job know it; others cannot connect to a queue pair over a network. */
#define VERBS_KEY_BYTES 16

/* What a provider counted itself, for a device context. */
struct verbs_counters {
  uint64_t sends;      /* work requests taken by post_send */
  uint64_t receives;   /* work requests taken by post_recv */
  uint64_t polls;      /* calls of poll_cq */
  uint64_t bytes_sent; /* delivered into posted receives */
  uint64_t dropped;    /* sends that met no posted receive */
  /* Because inject asked for it: sends */
  uint64_t dropped_by_fault;    /* lost, a link that was down included */
  uint64_t duplicated_by_fault; /* delivered twice */
  uint64_t truncated_by_fault;
  uint64_t corrupted_by_fault;
  uint64_t failed_by_fault; /* completed with an error */
  uint64_t delayed_by_fault;
  uint64_t completions_lost_by_fault; /* of any work requests */
};

struct verbs {
  const char* name; /* "soft" or "soft/" and a profile, "ibverbs", "librdma" */
  /* Registering costs nothing and pins nothing: the endpoint may register any buffer for one operation. */
  bool registers_freely;
  /* It may have queue pairs of the reliable connection (RC), too. Thunderbolt has none: create_qp says so. */
  bool reliable;

  struct ibv_device** (*get_device_list)(int* num_devices);
  void (*free_device_list)(struct ibv_device** list);
  const char* (*get_device_name)(struct ibv_device* device);
  struct ibv_context* (*open_device)(struct ibv_device* device);
  int (*close_device)(struct ibv_context* context);
  int (*query_device)(struct ibv_context* context, struct ibv_device_attr* attr);
  int (*query_port)(struct ibv_context* context, uint8_t port, struct ibv_port_attr* attr);
  int (*query_gid)(struct ibv_context* context, uint8_t port, int index, union ibv_gid* gid);
  int (*query_gid_type)(struct ibv_context* context, uint8_t port, int index, enum verbs_gid_type* type);
  struct ibv_pd* (*alloc_pd)(struct ibv_context* context);
  int (*dealloc_pd)(struct ibv_pd* pd);
  struct ibv_mr* (*reg_mr)(struct ibv_pd* pd, void* addr, size_t length, int access);
  int (*dereg_mr)(struct ibv_mr* mr);
  struct ibv_cq* (*create_cq)(struct ibv_context* context, int cqe, void* cq_context, struct ibv_comp_channel* channel,
                              int comp_vector);
  int (*destroy_cq)(struct ibv_cq* cq);
  struct ibv_qp* (*create_qp)(struct ibv_pd* pd, struct ibv_qp_init_attr* attr);
  int (*modify_qp)(struct ibv_qp* qp, struct ibv_qp_attr* attr, int attr_mask);
  int (*query_qp)(struct ibv_qp* qp, struct ibv_qp_attr* attr, int attr_mask, struct ibv_qp_init_attr* init_attr);
  int (*destroy_qp)(struct ibv_qp* qp);

  /* Memory that this provider's peers can receive into at full speed: zeroed, page-aligned. Hardware
   * takes any memory; the soft provider must place it where the peer process can map it. */
  void* (*alloc_memory)(struct ibv_context* context, size_t bytes);
  void (*free_memory)(struct ibv_context* context, void* memory, size_t bytes);

  /* Those below only the software provider has. */

  void (*read_counters)(struct ibv_context* context, struct verbs_counters* counters);

  /* Makes the provider misbehave, for tests: a comma-separated list such as "drop=1/100,seed=7"
   * (soft/emulation/fault_injection.h has them all). EINVAL, and no change, for a list with anything else. */
  int (*inject)(struct ibv_context* context, const char* faults);

  /* Ranks of one host play hosts of their own: what processes of a host share, they share with this one's. Before any
   * queue pair is created. */
  void (*set_virtual_host)(struct ibv_context* context, uint32_t host);

  /* errno of the last attempt to connect the queue pair to its peer by TCP; 0 where it is connected, or by memory. */
  int (*connect_error)(const struct ibv_qp* qp);

  /* Whether the queue pair reaches its peer by memory: an answer takes less time than a copy of a large message. */
  bool (*is_by_memory)(const struct ibv_qp* qp);

  /* Only peers that know the key connect from other hosts. Before any queue pair is created; without it no peer does.
   */
  int (*set_key)(struct ibv_context* context, const uint8_t key[VERBS_KEY_BYTES]);
};
