#include "verbs_trace.h"

#include "debug.h"

#include <arpa/inet.h>
#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define CALL_BYTES 512

/* "soft0: reg_mr(...) = 0", "= 22 (Invalid argument), errno 0" or "= -1, errno 22 (Invalid argument)": a verb returns
 * an errno value, or -1 and sets errno. Result and errno stay as they are for the caller. */
__attribute__((format(printf, 3, 4))) static int write_call(const char *device, int result, const char *format, ...) {
  const int error = errno;
  char call[CALL_BYTES];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(call, sizeof call, format, arguments);
  va_end(arguments);
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

struct address {
  char text[INET6_ADDRSTRLEN];
};

static struct address address_of(const union ibv_gid *gid) {
  struct address address;
  if (!inet_ntop(AF_INET6, gid->raw, address.text, sizeof address.text)) address.text[0] = 0;
  return address;
}

static int write_device(const char *device, const struct ibv_device_attr *attr, int result) {
  if (result) return write_call(device, result, "query_device()");
  return write_call(device, result,
                    "query_device() -> max_qp %d, max_qp_wr %d, max_sge %d, max_cq %d, max_cqe %d, "
                    "max_mr %d, max_mr_size %llu, max_pd %d",
                    attr->max_qp, attr->max_qp_wr, attr->max_sge, attr->max_cq, attr->max_cqe, attr->max_mr,
                    (unsigned long long)attr->max_mr_size, attr->max_pd);
}

static int write_port(const char *device, uint8_t port, const struct ibv_port_attr *attr, int result) {
  if (result) return write_call(device, result, "query_port(port %d)", port);
  return write_call(device, result,
                    "query_port(port %d) -> state %d, max_mtu %d, active_mtu %d, gid_tbl_len %d, "
                    "max_msg_sz %u, lid %d, link_layer %d",
                    port, attr->state, attr->max_mtu, attr->active_mtu, attr->gid_tbl_len, attr->max_msg_sz, attr->lid,
                    attr->link_layer);
}

static int write_gid(const char *device, uint8_t port, int index, const union ibv_gid *gid, int result) {
  if (result) return write_call(device, result, "query_gid(port %d, index %d)", port, index);
  return write_call(device, result, "query_gid(port %d, index %d) -> %s", port, index, address_of(gid).text);
}

static int write_queue_pair(const char *device, const struct ibv_qp_init_attr *asked,
                            const struct ibv_qp_init_attr *made, const struct ibv_qp *qp) {
  char created[CALL_BYTES] = "";
  if (qp)
    snprintf(created, sizeof created, " -> qp 0x%x, send_wr %u, recv_wr %u", qp->qp_num, made->cap.max_send_wr,
             made->cap.max_recv_wr);
  return write_call(device, qp ? 0 : -1, "create_qp(type %d, send_wr %u, recv_wr %u, send_sge %u, recv_sge %u)%s",
                    asked->qp_type, asked->cap.max_send_wr, asked->cap.max_recv_wr, asked->cap.max_send_sge,
                    asked->cap.max_recv_sge, created);
}

static int write_modify(const char *device, const struct ibv_qp *qp, const struct ibv_qp_attr *attr, int mask,
                        int result) {
  static const char *const states[] = {"RESET", "INIT", "RTR", "RTS"};
  const struct ibv_ah_attr *ah = &attr->ah_attr;
  unsigned state = (unsigned)attr->qp_state;
  char attributes[CALL_BYTES / 2] = "";
  if (attr->qp_state == IBV_QPS_INIT)
    snprintf(attributes, sizeof attributes, ", port_num %d, pkey_index %d, access 0x%x", attr->port_num,
             attr->pkey_index, attr->qp_access_flags);
  else if (attr->qp_state == IBV_QPS_RTR)
    snprintf(attributes, sizeof attributes,
             ", path_mtu %d, dest_qp 0x%x, rq_psn 0x%x, dgid %s, sgid_index %d, hop_limit %d, dlid %d, "
             "is_global %d, port_num %d",
             attr->path_mtu, attr->dest_qp_num, attr->rq_psn, address_of(&ah->grh.dgid).text, ah->grh.sgid_index,
             ah->grh.hop_limit, ah->dlid, ah->is_global, ah->port_num);
  else if (attr->qp_state == IBV_QPS_RTS)
    snprintf(attributes, sizeof attributes, ", sq_psn 0x%x", attr->sq_psn);
  return write_call(device, result, "modify_qp(qp 0x%x, to %s, mask 0x%x%s)", qp->qp_num,
                    state < 4 ? states[state] : "another state", (unsigned)mask, attributes);
}

static int write_query(const char *device, const struct ibv_qp *qp, const struct ibv_qp_attr *attr, int mask,
                       int result) {
  if (result) return write_call(device, result, "query_qp(qp 0x%x, mask 0x%x)", qp->qp_num, (unsigned)mask);
  return write_call(device, result, "query_qp(qp 0x%x, mask 0x%x) -> state %d, send_wr %u, recv_wr %u", qp->qp_num,
                    (unsigned)mask, attr->qp_state, attr->cap.max_send_wr, attr->cap.max_recv_wr);
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
