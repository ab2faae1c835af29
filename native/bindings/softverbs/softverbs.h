/*
 * What libsoftverbs exports: the names of libibverbs, with the arguments and results that <infiniband/verbs.h> gives
 * them, on the software provider. A program sees that header and not this one.
 *
 * Any thread may call them with any object, as with the real library: each context has a lock.
 */
#pragma once

#include "../../verbs/verbs_abi.h"

#include <sys/types.h>

#pragma GCC visibility push(default)

/* devices.c */
struct ibv_device** ibv_get_device_list(int* num_devices);
void ibv_free_device_list(struct ibv_device** list);
const char* ibv_get_device_name(struct ibv_device* device);
uint64_t ibv_get_device_guid(struct ibv_device* device); /* network byte order */
int ibv_get_device_index(struct ibv_device* device);
struct ibv_context* ibv_open_device(struct ibv_device* device);
int ibv_close_device(struct ibv_context* context);
int ibv_query_device(struct ibv_context* context, struct ibv_device_attr* attr);
int ibv_query_port(struct ibv_context* context, uint8_t port, struct ibv_port_attr* attr);
int ibv_query_gid(struct ibv_context* context, uint8_t port, int index, union ibv_gid* gid);
int _ibv_query_gid_ex(struct ibv_context* context, uint32_t port, uint32_t index, struct ibv_gid_entry* entry,
                      uint32_t flags, size_t entry_size);
ssize_t _ibv_query_gid_table(struct ibv_context* context, struct ibv_gid_entry* entries, size_t max_entries,
                             uint32_t flags, size_t entry_size);
/* 0: InfiniBand or RoCE v1, 1: RoCE v2, as in sysfs. */
int ibv_query_gid_type(struct ibv_context* context, uint8_t port, unsigned int index, unsigned int* type);
int ibv_query_pkey(struct ibv_context* context, uint8_t port, int index, uint16_t* pkey);
int ibv_get_pkey_index(struct ibv_context* context, uint8_t port, uint16_t pkey);
int ibv_fork_init(void);
int ibv_is_fork_initialized(void);

/* Makes the device misbehave: see soft/emulation/fault_injection.h for the list. The one name that libibverbs lacks. */
int softverbs_inject(struct ibv_context* context, const char* faults);

/* objects.c */
struct ibv_pd* ibv_alloc_pd(struct ibv_context* context);
int ibv_dealloc_pd(struct ibv_pd* pd);
struct ibv_mr* ibv_reg_mr(struct ibv_pd* pd, void* addr, size_t length, int access);
struct ibv_mr* ibv_reg_mr_iova(struct ibv_pd* pd, void* addr, size_t length, uint64_t iova, int access);
struct ibv_mr* ibv_reg_mr_iova2(struct ibv_pd* pd, void* addr, size_t length, uint64_t iova, unsigned int access);
int ibv_dereg_mr(struct ibv_mr* mr);
struct ibv_cq* ibv_create_cq(struct ibv_context* context, int cqe, void* cq_context, struct ibv_comp_channel* channel,
                             int comp_vector);
int ibv_destroy_cq(struct ibv_cq* cq);
struct ibv_qp* ibv_create_qp(struct ibv_pd* pd, struct ibv_qp_init_attr* attr);
int ibv_modify_qp(struct ibv_qp* qp, struct ibv_qp_attr* attr, int attr_mask);
int ibv_query_qp(struct ibv_qp* qp, struct ibv_qp_attr* attr, int attr_mask, struct ibv_qp_init_attr* init_attr);
int ibv_destroy_qp(struct ibv_qp* qp);
int ibv_get_async_event(struct ibv_context* context, struct ibv_async_event* event);
void ibv_ack_async_event(struct ibv_async_event* event);

/* strings.c */
const char* ibv_node_type_str(enum ibv_node_type type);
const char* ibv_port_state_str(enum ibv_port_state state);
const char* ibv_event_type_str(enum ibv_event_type event);
const char* ibv_wc_status_str(enum ibv_wc_status status);
int ibv_rate_to_mult(int rate);
int mult_to_ibv_rate(int mult);
int ibv_rate_to_mbps(int rate);
int mbps_to_ibv_rate(int mbps);

/* unsupported.c has what this provider lacks, with EOPNOTSUPP. Of these: */
struct ibv_comp_channel* ibv_create_comp_channel(struct ibv_context* context);
int ibv_destroy_comp_channel(struct ibv_comp_channel* channel);
struct ibv_ah* ibv_create_ah(struct ibv_pd* pd, struct ibv_ah_attr* attr);
int ibv_resize_cq(struct ibv_cq* cq, int cqe);

#pragma GCC visibility pop
