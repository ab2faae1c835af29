#include "verbs_trace.h"

#include "debug.h"

#include <arpa/inet.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#define CALL_BYTES 512

/* "soft0: reg_mr(...) = 0", "= 22 (Invalid argument), errno 0" or "= -1, errno 22 (Invalid argument)": a verb returns
 * an errno value, or -1 and sets errno. Result and errno stay as they are for the caller. */
static int write_result(const char *device, const char *call, int result) {
  const int error = errno;
  if (result > 0)
    debug(DEBUG_TRACE, "verbs", "%s: %s = %d (%s), errno %d", device, call, result, strerror(result), error);
  else if (result < 0)
    debug(DEBUG_TRACE, "verbs", "%s: %s = %d, errno %d (%s)", device, call, result, error,
          error ? strerror(error) : "no reason given");
  else
    debug(DEBUG_TRACE, "verbs", "%s: %s = 0", device, call);
  errno = error;
  return result;
}

static void write_address(char *text, const union ibv_gid *gid) {
  if (!inet_ntop(AF_INET6, gid->raw, text, INET6_ADDRSTRLEN)) text[0] = 0;
}

static int write_device(const char *device, const struct ibv_device_attr *attr, int result) {
  char call[CALL_BYTES] = "query_device()";
  if (!result)
    snprintf(call, sizeof call,
             "query_device() -> max_qp %d, max_qp_wr %d, max_sge %d, max_cq %d, max_cqe %d, "
             "max_mr %d, max_mr_size %llu, max_pd %d",
             attr->max_qp, attr->max_qp_wr, attr->max_sge, attr->max_cq, attr->max_cqe, attr->max_mr,
             (unsigned long long)attr->max_mr_size, attr->max_pd);
  return write_result(device, call, result);
}

static int write_port(const char *device, uint8_t port, const struct ibv_port_attr *attr, int result) {
  char call[CALL_BYTES];
  int length = snprintf(call, sizeof call, "query_port(port %d)", port);
  if (!result)
    snprintf(call + length, sizeof call - (size_t)length,
             " -> state %d, max_mtu %d, active_mtu %d, gid_tbl_len %d, "
             "max_msg_sz %u, lid %d, link_layer %d",
             attr->state, attr->max_mtu, attr->active_mtu, attr->gid_tbl_len, attr->max_msg_sz, attr->lid,
             attr->link_layer);
  return write_result(device, call, result);
}

static int write_gid(const char *device, uint8_t port, int index, const union ibv_gid *gid, int result) {
  char call[CALL_BYTES], address[INET6_ADDRSTRLEN] = "";
  if (!result) write_address(address, gid);
  snprintf(call, sizeof call, "query_gid(port %d, index %d)%s%s", port, index, result ? "" : " -> ", address);
  return write_result(device, call, result);
}

/* Apple's library takes regions on boundaries of 16 KiB. */
static void write_region(const char *device, const void *addr, size_t length, int access, int result) {
  char call[CALL_BYTES];
  snprintf(call, sizeof call, "reg_mr(address %% 16384 = %d, length %zu, access 0x%x)", (int)((uintptr_t)addr % 16384),
           length, access);
  write_result(device, call, result);
}

static void write_queue(const char *device, int cqe, const struct ibv_cq *cq) {
  char call[CALL_BYTES];
  int length = snprintf(call, sizeof call, "create_cq(cqe %d)", cqe);
  if (cq) snprintf(call + length, sizeof call - (size_t)length, " -> cqe %d", cq->cqe);
  write_result(device, call, cq ? 0 : -1);
}

static void write_queue_pair(const char *device, const struct ibv_qp_init_attr *asked,
                             const struct ibv_qp_init_attr *made, const struct ibv_qp *qp) {
  char call[CALL_BYTES];
  int length = snprintf(call, sizeof call, "create_qp(type %d, send_wr %u, recv_wr %u, send_sge %u, recv_sge %u)",
                        asked->qp_type, asked->cap.max_send_wr, asked->cap.max_recv_wr, asked->cap.max_send_sge,
                        asked->cap.max_recv_sge);
  if (qp)
    snprintf(call + length, sizeof call - (size_t)length, " -> qp 0x%x, send_wr %u, recv_wr %u", qp->qp_num,
             made->cap.max_send_wr, made->cap.max_recv_wr);
  write_result(device, call, qp ? 0 : -1);
}

static int write_modify(const char *device, const struct ibv_qp *qp, const struct ibv_qp_attr *attr, int mask,
                        int result) {
  static const char *const states[] = {"RESET", "INIT", "RTR", "RTS"};
  char call[CALL_BYTES], address[INET6_ADDRSTRLEN] = "";
  unsigned state = (unsigned)attr->qp_state;
  int length = snprintf(call, sizeof call, "modify_qp(qp 0x%x, to %s, mask 0x%x", qp->qp_num,
                        state < 4 ? states[state] : "another state", (unsigned)mask);
  char *rest = call + length;
  size_t room = sizeof call - (size_t)length;
  write_address(address, &attr->ah_attr.grh.dgid);
  if (attr->qp_state == IBV_QPS_INIT)
    snprintf(rest, room, ", port_num %d, pkey_index %d, access 0x%x)", attr->port_num, attr->pkey_index,
             attr->qp_access_flags);
  else if (attr->qp_state == IBV_QPS_RTR)
    snprintf(rest, room,
             ", path_mtu %d, dest_qp 0x%x, rq_psn 0x%x, dgid %s, sgid_index %d, hop_limit %d, dlid %d, "
             "is_global %d, port_num %d)",
             attr->path_mtu, attr->dest_qp_num, attr->rq_psn, address, attr->ah_attr.grh.sgid_index,
             attr->ah_attr.grh.hop_limit, attr->ah_attr.dlid, attr->ah_attr.is_global, attr->ah_attr.port_num);
  else if (attr->qp_state == IBV_QPS_RTS)
    snprintf(rest, room, ", sq_psn 0x%x)", attr->sq_psn);
  else
    snprintf(rest, room, ")");
  return write_result(device, call, result);
}

static int write_query(const char *device, const struct ibv_qp *qp, const struct ibv_qp_attr *attr, int mask,
                       int result) {
  char call[CALL_BYTES];
  int length = snprintf(call, sizeof call, "query_qp(qp 0x%x, mask 0x%x)", qp->qp_num, (unsigned)mask);
  if (!result)
    snprintf(call + length, sizeof call - (size_t)length, " -> state %d, send_wr %u, recv_wr %u", attr->qp_state,
             attr->cap.max_send_wr, attr->cap.max_recv_wr);
  return write_result(device, call, result);
}

/* A job may use both at once: the software provider within a host, the system's library between hosts. */
static const struct verbs *soft, *hardware;

#define TRACED(name) soft_##name
#define INNER soft
#include "verbs_trace_calls.h"

#define TRACED(name) hardware_##name
#define INNER hardware
#include "verbs_trace_calls.h"

const struct verbs *verbs_trace(const struct verbs *verbs) {
  static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  static struct verbs traced_soft, traced_hardware;
  if (atomic_load_explicit(&debug_level, memory_order_relaxed) < DEBUG_TRACE) return verbs;
  const bool is_soft = strncmp(verbs->name, "soft", 4) == 0;
  const struct verbs **inner = is_soft ? &soft : &hardware;
  struct verbs *table = is_soft ? &traced_soft : &traced_hardware;
  pthread_mutex_lock(&lock);
  if (!*inner) {
    *inner = verbs;
    *table = *verbs;
    (is_soft ? soft_fill : hardware_fill)(table);
  }
  const bool is_traced = *inner == verbs; /* another profile of the software provider is not */
  pthread_mutex_unlock(&lock);
  return is_traced ? table : verbs;
}
