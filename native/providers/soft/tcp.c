/* The connections of a context: who listens, who is looked at, who ends when. See tcp.h. */
#define _GNU_SOURCE 1
#include "tcp.h"

#include "addresses.h"
#include "clock.h"
#include "sockets.h"
#include "tcp_receive.h"
#include "tcp_send.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* Before those that are connected have their turn. */
#define ACCEPTS 64

/* In how many turns the listener is looked at once, and who only sends and can: a system call costs by the socket. */
#define SELDOM 16

int soft_tcp_set_key(struct ibv_context *verbs, const uint8_t key[VERBS_KEY_BYTES]) {
  struct soft_context *context = soft_context(verbs);
  if (context->tcp || context->qps_created) return soft_error(EBUSY);
  struct soft_tcp *tcp = calloc(1, sizeof *tcp);
  if (!tcp) return soft_error(ENOMEM);
  memcpy(tcp->key, key, sizeof tcp->key);
  tcp->listener = socket_listen(&tcp->port);
  if (tcp->listener < 0) {
    int error = errno;
    free(tcp);
    return soft_error(error);
  }
  context->tcp = tcp;
  return 0;
}

static void free_closed(struct soft_tcp *tcp) {
  for (struct tcp_receiver **link = &tcp->receivers; *link;) {
    struct tcp_receiver *receiver = *link;
    if (receiver->fd >= 0) {
      link = &receiver->next;
    } else {
      *link = receiver->next;
      free(receiver);
    }
  }
}

/* In a forked child the descriptors are closed already, and may be other files by now. */
static bool is_forked_child(const struct soft_context *context) { return !context->segment->layout; }

void soft_tcp_close(struct soft_context *context) {
  struct soft_tcp *tcp = context->tcp;
  if (!tcp) return;
  if (!is_forked_child(context)) socket_close(tcp->listener);
  for (struct tcp_receiver *r = tcp->receivers; r; r = r->next) {
    if (is_forked_child(context))
      r->fd = -1;
    else
      tcp_receiver_close(r);
  }
  free_closed(tcp);
  free(tcp);
  context->tcp = NULL;
}

int soft_tcp_address(struct soft_qp *qp, const struct ibv_ah_attr *ah) {
  struct soft_context *context = soft_context(qp->verbs.context);
  struct in_addr to;
  if (!context->tcp || !ah->dlid || !soft_address_from_gid(&ah->grh.dgid, &to)) return EINVAL;
  qp->tcp = calloc(1, sizeof *qp->tcp);
  if (!qp->tcp) return ENOMEM;
  struct in_addr from = context->addresses.list[ah->grh.sgid_index - soft_memory_gid(context) - 1];
  qp->tcp->fd = -1;
  qp->tcp->from = (struct sockaddr_in){.sin_family = AF_INET, .sin_addr = from};
  qp->tcp->to = (struct sockaddr_in){.sin_family = AF_INET, .sin_addr = to, .sin_port = htons(ah->dlid)};
  context->tcp_users++;
  return 0;
}

void soft_tcp_start(struct soft_qp *qp) { tcp_sender_connect(qp, soft_clock_ns()); }

void soft_tcp_stop(struct soft_qp *qp) {
  tcp_sender_close(qp->tcp);
  for (struct tcp_receiver *r = soft_context(qp->verbs.context)->tcp->receivers; r; r = r->next)
    if (r->fd >= 0 && tcp_receiver_serves(r, qp)) tcp_receiver_close(r);
}

void soft_tcp_forget(struct soft_qp *qp) {
  if (!qp->tcp) return;
  free(qp->tcp);
  qp->tcp = NULL;
  soft_context(qp->verbs.context)->tcp_users--;
}

int soft_tcp_error(const struct ibv_qp *verbs) {
  const struct soft_qp *qp = (const struct soft_qp *)verbs;
  return qp->tcp ? qp->tcp->error : 0;
}

/* For one more. Of unauthenticated connections the oldest is closed. Peers that no queue pair has go before others. */
static bool make_room(struct soft_context *context) {
  struct tcp_receiver *first_stranger = NULL, *first_idle = NULL;
  unsigned strangers = 0, all = 0;
  for (struct tcp_receiver *r = context->tcp->receivers; r; r = r->next) {
    if (r->fd < 0) continue;
    all++;
    const struct soft_qp *qp = context->qps[ntohl(r->greeting.to_qp) % SOFT_MAX_QP];
    if (!r->open) {
      strangers++;
      first_stranger = r; /* new ones are put in front */
    } else if (!qp || !tcp_receiver_serves(r, qp)) {
      first_idle = r;
    }
  }
  if (strangers < TCP_MAX_STRANGERS && all < TCP_MAX_RECEIVERS) return true;
  struct tcp_receiver *leaves = first_stranger ? first_stranger : first_idle;
  if (leaves) tcp_receiver_close(leaves);
  return leaves != NULL;
}

static void accept_peers(struct soft_context *context, uint64_t now) {
  struct soft_tcp *tcp = context->tcp;
  for (int i = 0; i < ACCEPTS; i++) {
    int fd = socket_accept(tcp->listener);
    if (fd < 0) return;
    struct tcp_receiver *receiver = make_room(context) ? tcp_receiver_create(fd, now) : NULL;
    if (receiver) {
      receiver->next = tcp->receivers;
      tcp->receivers = receiver;
    } else {
      socket_close(fd);
    }
  }
}

static bool sends_by_tcp(const struct soft_qp *qp) { return qp && qp->tcp && qp->verbs.state == IBV_QPS_RTS; }

/* The sockets in the order in which they are gone through: the listener, receivers, senders; -1 is not looked at. Sets
 * `*waiting` if a thread waits for anything else, for a receive or for a time. */
static unsigned list_sockets(struct soft_context *context, bool *waiting) {
  struct soft_tcp *tcp = context->tcp;
  bool all = tcp->turns++ % SELDOM == 0;
  unsigned count = 0;
  *waiting = false;
  tcp->sockets[count++] = (struct pollfd){.fd = all ? tcp->listener : -1, .events = POLLIN};
  for (const struct tcp_receiver *r = tcp->receivers; r; r = r->next) {
    tcp->sockets[count++] = (struct pollfd){.fd = r->paused ? -1 : r->fd, .events = POLLIN};
    *waiting |= r->paused || !r->open;
  }
  for (int i = 0; i < SOFT_MAX_QP; i++) {
    const struct soft_qp *qp = context->qps[i];
    if (!sends_by_tcp(qp)) continue;
    bool seldom = qp->tcp->state == TCP_OPEN && qp->tcp->writable;
    int fd = seldom && !all ? -1 : qp->tcp->fd;
    tcp->sockets[count++] = (struct pollfd){.fd = fd, .events = tcp_sender_events(qp->tcp)};
    *waiting |= qp->tcp->state != TCP_OPEN;
  }
  return count;
}

void soft_tcp_progress(struct soft_context *context) {
  struct soft_tcp *tcp = context->tcp;
  if (is_forked_child(context)) return;
  free_closed(tcp);
  bool waiting;
  int ready = poll(tcp->sockets, list_sockets(context, &waiting), 0);
  if (ready <= 0 && !waiting) return;
  uint64_t now = soft_clock_ns();
  const struct pollfd *next = &tcp->sockets[1];
  for (struct tcp_receiver *r = tcp->receivers; r; r = r->next, next++)
    if (r->fd >= 0) tcp_receiver_progress(context, r, ready > 0 ? next->revents : 0, now);
  for (int i = 0; i < SOFT_MAX_QP; i++)
    if (sends_by_tcp(context->qps[i])) tcp_sender_progress(context->qps[i], ready > 0 ? (next++)->revents : 0, now);
  if (ready > 0 && tcp->sockets[0].revents) accept_peers(context, now);
}
