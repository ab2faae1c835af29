/*
 * What this provider lacks: completion channels, address handles, shared receive queues, multicast, imported and
 * resized objects. They are here, and say so, because a program that is loaded beside the real library would otherwise
 * call that one with objects of this one. No argument is read, so most are not declared.
 */
#include "softverbs.h"

#include <errno.h>

#define EXPORT __attribute__((visibility("default")))
#define NO_OBJECT(name)                                                                                                \
  EXPORT void *name(void);                                                                                             \
  void *name(void) {                                                                                                   \
    errno = EOPNOTSUPP;                                                                                                \
    return NULL;                                                                                                       \
  }
/* `result` where libibverbs returns the error number itself, or -1. */
#define NO_CALL(name, result)                                                                                          \
  EXPORT int name(void);                                                                                               \
  int name(void) {                                                                                                     \
    errno = EOPNOTSUPP;                                                                                                \
    return result;                                                                                                     \
  }
#define NOTHING_TO_DO(name)                                                                                            \
  EXPORT int name(void);                                                                                               \
  int name(void) { return 0; }

struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *context) {
  (void)context;
  errno = EOPNOTSUPP;
  return NULL;
}

int ibv_destroy_comp_channel(struct ibv_comp_channel *channel) {
  (void)channel;
  return errno = EOPNOTSUPP;
}

struct ibv_ah *ibv_create_ah(struct ibv_pd *pd, struct ibv_ah_attr *attr) {
  (void)pd, (void)attr;
  errno = EOPNOTSUPP;
  return NULL;
}

int ibv_resize_cq(struct ibv_cq *cq, int cqe) {
  (void)cq, (void)cqe;
  return errno = EOPNOTSUPP;
}

NO_OBJECT(ibv_create_srq)
NO_OBJECT(ibv_create_ah_from_wc)
NO_OBJECT(ibv_reg_dmabuf_mr)
NO_OBJECT(ibv_import_device)
NO_OBJECT(ibv_import_pd)
NO_OBJECT(ibv_import_mr)
NO_OBJECT(ibv_import_dm)
NO_OBJECT(ibv_qp_to_qp_ex)

NO_CALL(ibv_get_cq_event, -1)
NO_CALL(ibv_rereg_mr, -1)
NO_CALL(ibv_modify_srq, EOPNOTSUPP)
NO_CALL(ibv_query_srq, EOPNOTSUPP)
NO_CALL(ibv_destroy_srq, EOPNOTSUPP)
NO_CALL(ibv_init_ah_from_wc, -1)
NO_CALL(ibv_destroy_ah, EOPNOTSUPP)
NO_CALL(ibv_attach_mcast, EOPNOTSUPP)
NO_CALL(ibv_detach_mcast, EOPNOTSUPP)
NO_CALL(ibv_query_ece, EOPNOTSUPP)
NO_CALL(ibv_set_ece, EOPNOTSUPP)
NO_CALL(ibv_resolve_eth_l2_from_gid, -1)

NOTHING_TO_DO(ibv_ack_cq_events)
NOTHING_TO_DO(ibv_unimport_pd)
NOTHING_TO_DO(ibv_unimport_mr)
NOTHING_TO_DO(ibv_unimport_dm)
NOTHING_TO_DO(ibv_dontfork_range)
NOTHING_TO_DO(ibv_dofork_range)
NOTHING_TO_DO(ibv_query_qp_data_in_order) /* 0: not in order, for all that is promised */
