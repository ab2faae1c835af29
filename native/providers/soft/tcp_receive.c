/* The receiving half of a queue pair: a connection that a peer has made, and messages from it. Nothing that comes over
 * it is used before it is checked. See tcp.h. */
#define _GNU_SOURCE 1
#include "tcp_receive.h"

#include "memory.h"
#include "sockets.h"
#include "tcp_handshake.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>

/* What is read from one connection before the others have their turn. */
#define READS 16

struct tcp_receiver *tcp_receiver_create(int fd, uint64_t now) {
  struct tcp_receiver *receiver = calloc(1, sizeof *receiver);
  if (!receiver) return NULL;
  receiver->fd = fd;
  receiver->until_ns = now + TCP_HANDSHAKE_NS;
  bool challenged = tcp_random(receiver->challenge) &&
                    send(fd, receiver->challenge, TCP_NONCE_BYTES, SOCKET_SEND_FLAGS) == TCP_NONCE_BYTES;
  if (challenged) return receiver;
  free(receiver);
  return NULL;
}

void tcp_receiver_close(struct tcp_receiver *receiver) {
  socket_close(receiver->fd);
  receiver->fd = -1;
}

static bool came_from(const struct tcp_greeting *greeting, const struct ibv_ah_attr *ah) {
  return memcmp(greeting->gid, ah->grh.dgid.raw, sizeof greeting->gid) == 0 && ntohl(greeting->port) == ah->dlid;
}

bool tcp_receiver_serves(const struct tcp_receiver *receiver, const struct soft_qp *qp) {
  const struct tcp_greeting *greeting = &receiver->greeting;
  return receiver->open && qp->tcp && ntohl(greeting->to_qp) == qp->verbs.qp_num &&
         ntohl(greeting->from_qp) == qp->attr.dest_qp_num && ntohl(greeting->psn) == qp->attr.rq_psn &&
         came_from(greeting, &qp->attr.ah_attr);
}

/* A queue pair that is connected to the one that sends here, or NULL. It may come to that state only now. */
static struct soft_qp *find_qp(const struct soft_context *context, const struct tcp_receiver *receiver) {
  struct soft_qp *qp = context->qps[ntohl(receiver->greeting.to_qp) % SOFT_MAX_QP];
  if (!qp || (qp->verbs.state != IBV_QPS_RTR && qp->verbs.state != IBV_QPS_RTS)) return NULL;
  if (atomic_load(&qp->shared->claim) & CLAIM_CLOSED) return NULL;
  return tcp_receiver_serves(receiver, qp) ? qp : NULL;
}

/* One queue pair sends over one connection: an older one of it is one that it has given up, and what is left in there
 * must not come after what comes here. */
static void replace_older(struct soft_context *context, const struct tcp_receiver *receiver) {
  const struct tcp_greeting *new = &receiver->greeting;
  for (struct tcp_receiver *r = context->tcp->receivers; r; r = r->next) {
    const struct tcp_greeting *old = &r->greeting;
    if (r == receiver || !r->open || old->to_qp != new->to_qp || old->from_qp != new->from_qp) continue;
    if (old->port == new->port && memcmp(old->gid, new->gid, sizeof old->gid) == 0) tcp_receiver_close(r);
  }
}

static bool finish_handshake(struct soft_context *context, struct tcp_receiver *receiver) {
  const struct soft_tcp *tcp = context->tcp;
  memcpy(&receiver->greeting, receiver->buffer, sizeof receiver->greeting);
  if (!tcp_check_greeting(&receiver->greeting, tcp->key, receiver->challenge)) return false;
  if (ntohl(receiver->greeting.profile) != (uint32_t)(context->profile - soft_profiles)) return false;
  uint8_t proof[SIPHASH_BYTES];
  tcp_proof(&receiver->greeting, tcp->key, receiver->challenge, proof);
  if (send(receiver->fd, proof, sizeof proof, SOCKET_SEND_FLAGS) != (ssize_t)sizeof proof) return false;
  receiver->open = true;
  receiver->start = receiver->end = 0;
  replace_older(context, receiver);
  return true;
}

/* Takes the receive that the queue pair waits with. A status other than SUCCESS stops the queue pair, as in
 * work_queue.c. */
static void complete(struct soft_qp *qp, const struct tcp_header *header, uint32_t status) {
  struct shared_queue_pair *shared = qp->shared;
  uint64_t position = atomic_load(&shared->claim);
  if ((position & CLAIM_CLOSED) || !atomic_compare_exchange_strong(&shared->claim, &position, position + 1)) return;
  if (status != IBV_WC_SUCCESS) atomic_fetch_or(&shared->claim, CLAIM_CLOSED);
  uint32_t flags = tcp_has_imm(header->kind) ? IBV_WC_WITH_IMM : 0;
  if (tcp_is_write(header->kind)) flags |= COMPLETED_BY_WRITE;
  if (header->kind == TCP_SEND_IN_PART) flags |= COMPLETED_IN_PART;
  struct shared_completion *completion = &shared->completions[position & qp->rq_mask];
  shared_complete(completion, position, status, header->length, flags, header->imm_data);
}

static uint64_t written_address(const struct tcp_header *header) {
  return (uint64_t)header->addr[0] << 32 | header->addr[1];
}

/* Whether the peer of this queue pair may write where the header says. No byte needs no key. */
static bool may_write(const struct soft_qp *qp, const struct tcp_header *header) {
  if (!(qp->attr.qp_access_flags & IBV_ACCESS_REMOTE_WRITE)) return false;
  return !header->length ||
         soft_find_mr(qp->verbs.pd, header->rkey, written_address(header), header->length, IBV_ACCESS_REMOTE_WRITE);
}

static bool has_receive(const struct soft_qp *qp) { return atomic_load(&qp->shared->claim) < qp->rq_posted; }

/* What may not be written is no error: it is dropped, as in shared memory. */
static void place_write(struct soft_context *context, struct tcp_receiver *receiver, struct soft_qp *qp) {
  const struct tcp_header *header = &receiver->header;
  if (qp && may_write(qp, header) && (header->kind == TCP_WRITE || has_receive(qp))) {
    receiver->qp = qp;
    receiver->to = (char *)(uintptr_t)written_address(header);
  } else {
    context->counters.dropped++;
  }
}

/* What to do with the message whose header has come: false if it waits for a receive, and nothing may be read. */
static bool place_message(struct soft_context *context, struct tcp_receiver *receiver) {
  const struct soft_profile *profile = context->profile;
  struct soft_qp *qp = find_qp(context, receiver);
  receiver->qp = NULL;
  receiver->to = NULL;
  if (tcp_is_write(receiver->header.kind)) {
    place_write(context, receiver, qp);
    return true;
  }
  if (!qp || !has_receive(qp)) {
    if (profile->rnr_wait) return false;
    context->counters.dropped++;
    return true;
  }
  struct shared_receive receive = qp->shared->receives[atomic_load(&qp->shared->claim) & qp->rq_mask];
  uint32_t length = receiver->header.length, status = receive.status;
  if (profile->drops_too_long && length > receive.length) {
    context->counters.dropped++;
    return true;
  }
  if (receive.offset > SEGMENT_BYTES || receive.length > SEGMENT_BYTES - receive.offset) status = IBV_WC_LOC_PROT_ERR;
  if (status == IBV_WC_SUCCESS && !soft_fits(profile, length, receive.length)) status = IBV_WC_LOC_LEN_ERR;
  if (status != IBV_WC_SUCCESS) {
    complete(qp, &receiver->header, status);
    return true;
  }
  receiver->qp = qp;
  receiver->to = (char *)context->segment->layout + receive.offset;
  return true;
}

/* false: no peer of ours would send that. */
static bool check_header(const struct soft_profile *profile, const struct tcp_header *header) {
  bool allowed = header->kind == TCP_SEND || (header->kind == TCP_SEND_WITH_IMM && profile->immediate) ||
                 (tcp_is_write(header->kind) && profile->writes) ||
                 (header->kind == TCP_SEND_IN_PART && profile->packets);
  return allowed && header->length <= profile->max_message;
}

/* Reads into the rest of the message, if one has begun, and into the buffer behind. Returns what recv does. */
static ssize_t fill(struct tcp_receiver *receiver) {
  if (receiver->start == receiver->end) receiver->start = receiver->end = 0;
  struct iovec list[2] = {
      {.iov_base = receiver->to, .iov_len = receiver->to ? (size_t)receiver->left : 0},
      {.iov_base = receiver->buffer + receiver->end, .iov_len = sizeof receiver->buffer - receiver->end},
  };
  ssize_t bytes = readv(receiver->fd, list, 2);
  if (bytes <= 0) return bytes;
  size_t direct = (size_t)bytes < list[0].iov_len ? (size_t)bytes : list[0].iov_len;
  receiver->left -= direct;
  if (receiver->to) receiver->to += direct;
  receiver->end += (unsigned)((size_t)bytes - direct);
  return bytes;
}

/* Moves what was read ahead to where it belongs. */
static void take_payload(struct tcp_receiver *receiver) {
  uint64_t bytes = receiver->end - receiver->start;
  if (bytes > receiver->left) bytes = receiver->left;
  if (receiver->to && bytes) {
    memcpy(receiver->to, receiver->buffer + receiver->start, (size_t)bytes);
    receiver->to += bytes;
  }
  receiver->start += (unsigned)bytes;
  receiver->left -= bytes;
}

static void end_message(struct tcp_receiver *receiver) {
  if (receiver->qp && receiver->header.kind != TCP_WRITE) complete(receiver->qp, &receiver->header, IBV_WC_SUCCESS);
  receiver->qp = NULL;
  receiver->to = NULL;
}

static bool take_header(struct tcp_receiver *receiver) {
  struct tcp_header *header = &receiver->header;
  if (receiver->end - receiver->start < sizeof *header) return false;
  memcpy(header, receiver->buffer + receiver->start, sizeof *header);
  header->kind = ntohl(header->kind);
  header->length = ntohl(header->length);
  header->rkey = ntohl(header->rkey);
  for (int half = 0; half < 2; half++) header->addr[half] = ntohl(header->addr[half]);
  return true;
}

/* Goes through all that was read. false: the connection has to be closed. */
static bool take_messages(struct soft_context *context, struct tcp_receiver *receiver) {
  receiver->paused = false;
  for (;;) {
    take_payload(receiver);
    if (receiver->left) return true;
    end_message(receiver);
    if (!take_header(receiver)) break;
    if (!check_header(context->profile, &receiver->header)) return false;
    if (!place_message(context, receiver)) {
      receiver->paused = true;
      break;
    }
    receiver->start += sizeof receiver->header;
    receiver->left = receiver->header.length;
  }
  /* What is left is the beginning of a header, or of a message that waits. */
  memmove(receiver->buffer, receiver->buffer + receiver->start, receiver->end - receiver->start);
  receiver->end -= receiver->start;
  receiver->start = 0;
  return true;
}

static bool take_greeting(struct soft_context *context, struct tcp_receiver *receiver) {
  if (receiver->end < sizeof(struct tcp_greeting)) return true;
  /* A peer says nothing more before it has the answer. */
  return receiver->end == sizeof(struct tcp_greeting) && finish_handshake(context, receiver);
}

/* false: the connection has ended, or has to. */
static bool read_some(struct soft_context *context, struct tcp_receiver *receiver) {
  for (int reads = 0; reads < READS && !receiver->paused; reads++) {
    ssize_t bytes = fill(receiver);
    if (bytes == 0) return false;
    if (bytes < 0) return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
    if (!(receiver->open ? take_messages : take_greeting)(context, receiver)) return false;
  }
  return true;
}

/* A region may be gone since the write into it began: the rest is dropped, and its immediate data with it. */
static void check_write(struct soft_context *context, struct tcp_receiver *receiver) {
  if (!receiver->qp || !tcp_is_write(receiver->header.kind) || may_write(receiver->qp, &receiver->header)) return;
  receiver->qp = NULL;
  receiver->to = NULL;
  context->counters.dropped++;
}

void tcp_receiver_progress(struct soft_context *context, struct tcp_receiver *receiver, short events, uint64_t now) {
  bool good = receiver->open || now <= receiver->until_ns;
  check_write(context, receiver);
  if (good && receiver->paused) good = take_messages(context, receiver);
  if (good && events) good = read_some(context, receiver);
  if (!good) tcp_receiver_close(receiver);
}
