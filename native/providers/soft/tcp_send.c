/* The sending half of a queue pair: its connection to the peer's listener, and messages on it. See tcp.h. */
#define _GNU_SOURCE 1
#include "tcp_send.h"

#include "addresses.h"
#include "clock.h"
#include "message.h"
#include "sockets.h"
#include "tcp_handshake.h"

#include <arpa/inet.h>
#include <errno.h>
#include <string.h>
#include <sys/uio.h>

#define FIRST_PAUSE_NS UINT64_C(100000000)
#define LONGEST_PAUSE_NS UINT64_C(2000000000)
/* A connection that has lived this long is re-created at once; otherwise two sides that break each other's off would
 * do nothing else. */
#define GOOD_NS UINT64_C(1000000000)

void tcp_sender_close(struct tcp_sender *sender) {
  socket_close(sender->fd);
  sender->fd = -1;
  sender->state = TCP_WAITING;
  sender->copies = 0; /* the rest of a message is no message */
  sender->writable = false;
}

static void try_again(struct tcp_sender *sender, uint64_t now) {
  bool was_good = sender->state == TCP_OPEN && now - sender->until_ns > GOOD_NS;
  tcp_sender_close(sender);
  if (was_good || !sender->pause_ns) sender->pause_ns = FIRST_PAUSE_NS;
  sender->until_ns = was_good ? now : now + sender->pause_ns;
  if (!was_good) sender->pause_ns = 2 * sender->pause_ns < LONGEST_PAUSE_NS ? 2 * sender->pause_ns : LONGEST_PAUSE_NS;
}

void tcp_sender_connect(struct soft_qp *qp, uint64_t now) {
  struct tcp_sender *sender = qp->tcp;
  sender->fd = socket_connect(&sender->from, &sender->to);
  if (sender->fd < 0) {
    sender->error = errno;
    try_again(sender, now);
    return;
  }
  sender->state = TCP_CONNECTING;
  sender->until_ns = now + TCP_HANDSHAKE_NS;
  sender->heard_bytes = 0;
}

short tcp_sender_events(const struct tcp_sender *sender) {
  if (sender->state == TCP_CONNECTING) return POLLOUT;
  return sender->state == TCP_OPEN && !sender->writable ? POLLIN | POLLOUT : POLLIN;
}

/* false: the connection has ended. Sets `*whole` when all bytes are there. */
static bool hear(struct tcp_sender *sender, bool *whole) {
  ssize_t bytes = recv(sender->fd, sender->heard + sender->heard_bytes, sizeof sender->heard - sender->heard_bytes, 0);
  if (bytes <= 0) return bytes < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR);
  sender->heard_bytes += (unsigned)bytes;
  *whole = sender->heard_bytes == sizeof sender->heard;
  return true;
}

static bool greet(struct soft_qp *qp) {
  struct tcp_sender *sender = qp->tcp;
  const struct soft_context *context = soft_context(qp->verbs.context);
  struct tcp_greeting *greeting = &sender->greeting;
  memcpy(sender->challenge, sender->heard, sizeof sender->challenge);
  union ibv_gid gid;
  soft_address_to_gid(sender->from.sin_addr, &gid);
  memcpy(greeting->gid, gid.raw, sizeof greeting->gid);
  greeting->port = htonl(ntohs(context->tcp->port));
  greeting->profile = htonl((uint32_t)(context->profile - soft_profiles));
  greeting->to_qp = htonl(qp->attr.dest_qp_num);
  greeting->from_qp = htonl(qp->verbs.qp_num);
  greeting->psn = htonl(qp->attr.sq_psn);
  if (!tcp_greet(greeting, context->tcp->key, sender->challenge)) return false;
  sender->state = TCP_GREETED;
  sender->heard_bytes = 0;
  /* The first bytes of a connection find room. */
  return send(sender->fd, greeting, sizeof *greeting, SOCKET_SEND_FLAGS) == (ssize_t)sizeof *greeting;
}

static bool check_response(struct soft_qp *qp, uint64_t now) {
  struct tcp_sender *sender = qp->tcp;
  uint8_t proof[SIPHASH_BYTES];
  tcp_proof(&sender->greeting, soft_context(qp->verbs.context)->tcp->key, sender->challenge, proof);
  if (!tcp_same_proof(proof, sender->heard)) return false;
  sender->state = TCP_OPEN;
  sender->error = 0;
  sender->until_ns = now;
  sender->writable = true;
  return true;
}

/* A listener says nothing after the handshake: what can be read then is the end of the connection. */
static bool advance(struct soft_qp *qp, short events, uint64_t now) {
  struct tcp_sender *sender = qp->tcp;
  bool whole = false;
  switch (sender->state) {
    case TCP_CONNECTING:
      sender->error = socket_error(sender->fd);
      if (sender->error) return false;
      sender->state = TCP_CHALLENGED;
      return true;
    case TCP_CHALLENGED: return hear(sender, &whole) && (!whole || greet(qp));
    case TCP_GREETED: return hear(sender, &whole) && (!whole || check_response(qp, now));
    default:
      if (events & POLLOUT) sender->writable = true;
      return !(events & (POLLIN | POLLHUP | POLLERR));
  }
}

void tcp_sender_progress(struct soft_qp *qp, short events, uint64_t now) {
  struct tcp_sender *sender = qp->tcp;
  if (sender->state == TCP_WAITING) {
    if (now >= sender->until_ns) tcp_sender_connect(qp, now);
    return;
  }
  bool late = sender->state != TCP_OPEN && now > sender->until_ns;
  if (late) sender->error = ETIMEDOUT;
  if (late || (events && !advance(qp, events, now))) try_again(sender, now);
}

bool soft_tcp_has_begun(const struct soft_qp *qp) { return qp->tcp->begun; }

bool soft_tcp_must_wait(const struct soft_qp *qp) {
  const struct tcp_sender *sender = qp->tcp;
  if (sender->begun && !sender->copies) return false; /* it is lost */
  if (sender->state == TCP_WAITING) return soft_context(qp->verbs.context)->profile->rnr_wait;
  return !sender->writable;
}

/* The byte of the payload at `place`. */
static uint8_t byte_at(const struct ibv_send_wr *wr, uint64_t place) {
  int i = 0;
  for (; place >= wr->sg_list[i].length; i++) place -= wr->sg_list[i].length;
  return ((const uint8_t *)(uintptr_t)wr->sg_list[i].addr)[place];
}

static void damage(struct soft_context *context, struct tcp_sender *sender, const struct ibv_send_wr *wr,
                   unsigned faults) {
  if (sender->length > 0 && (faults & 1u << SOFT_FAULT_TRUNCATE)) {
    sender->length = (uint32_t)soft_faults_draw(&context->faults, sender->length);
    context->counters.truncated_by_fault++;
  }
  if (sender->length > 0 && (faults & 1u << SOFT_FAULT_CORRUPT)) {
    uint64_t bit = soft_faults_draw(&context->faults, 8 * (uint64_t)sender->length);
    sender->wrong = bit / 8;
    sender->wrong_byte = byte_at(wr, sender->wrong) ^ (uint8_t)(1 << bit % 8);
    context->counters.corrupted_by_fault++;
  }
}

static uint32_t kind_of(const struct ibv_send_wr *wr) {
  if (wr->send_flags & SOFT_SEND_IN_PART) return TCP_SEND_IN_PART;
  switch (wr->opcode) {
    case IBV_WR_SEND_WITH_IMM: return TCP_SEND_WITH_IMM;
    case IBV_WR_RDMA_WRITE: return TCP_WRITE;
    case IBV_WR_RDMA_WRITE_WITH_IMM: return TCP_WRITE_WITH_IMM;
    default: return TCP_SEND;
  }
}

bool soft_tcp_begin(struct soft_qp *qp, const struct ibv_send_wr *wr, unsigned faults) {
  struct tcp_sender *sender = qp->tcp;
  if (sender->state != TCP_OPEN) return false;
  if (sender->begun) {
    sender->copies++;
    return true;
  }
  uint32_t kind = kind_of(wr);
  uint64_t addr = tcp_is_write(kind) ? wr->wr.rdma.remote_addr : 0;
  sender->begun = true;
  sender->copies = 1;
  sender->written = 0;
  sender->wrong = UINT64_MAX;
  sender->length = 0;
  for (int i = 0; i < wr->num_sge; i++) sender->length += wr->sg_list[i].length;
  if (__builtin_expect(faults != 0, 0)) damage(soft_context(qp->verbs.context), sender, wr, faults);
  sender->header = (struct tcp_header){
      .kind = htonl(kind),
      .length = htonl(sender->length),
      .imm_data = tcp_has_imm(kind) ? wr->imm_data : 0,
      .rkey = tcp_is_write(kind) ? htonl(wr->wr.rdma.rkey) : 0,
      .addr = {htonl((uint32_t)(addr >> 32)), htonl((uint32_t)addr)},
  };
  return true;
}

struct pieces {
  struct iovec list[1 + SOFT_MAX_SEND_SGE + 2]; /* header, payload, and a byte in it that is wrong */
  int count;
  uint64_t skip; /* written already */
};

static void add_piece(struct pieces *pieces, const void *bytes, uint64_t length) {
  uint64_t skipped = pieces->skip < length ? pieces->skip : length;
  pieces->skip -= skipped;
  if (length == skipped) return;
  pieces->list[pieces->count++] =
      (struct iovec){.iov_base = (char *)(uintptr_t)bytes + skipped, .iov_len = (size_t)(length - skipped)};
}

static void add_payload(struct pieces *pieces, const struct tcp_sender *sender, const struct ibv_send_wr *wr) {
  uint64_t at = 0;
  for (int i = 0; i < wr->num_sge && at < sender->length; i++) {
    const char *bytes = (const char *)(uintptr_t)wr->sg_list[i].addr;
    uint64_t length = wr->sg_list[i].length;
    if (length > sender->length - at) length = sender->length - at;
    uint64_t right = sender->wrong - at; /* bytes before the wrong one; huge if it lies before these */
    if (right < length) {
      add_piece(pieces, bytes, right);
      add_piece(pieces, &sender->wrong_byte, 1);
      add_piece(pieces, bytes + right + 1, length - right - 1);
    } else {
      add_piece(pieces, bytes, length);
    }
    at += length;
  }
}

/* What the system took of one copy of the message; -1 with errno set. */
static ssize_t write_copy(struct tcp_sender *sender, const struct ibv_send_wr *wr) {
  struct pieces pieces = {.skip = sender->written};
  add_piece(&pieces, &sender->header, sizeof sender->header);
  add_payload(&pieces, sender, wr);
  struct msghdr message = {.msg_iov = pieces.list, .msg_iovlen = (size_t)pieces.count};
  return sendmsg(sender->fd, &message, SOCKET_SEND_FLAGS);
}

bool soft_tcp_write(struct soft_qp *qp, const struct ibv_send_wr *wr) {
  struct tcp_sender *sender = qp->tcp;
  uint64_t whole = sizeof sender->header + (uint64_t)sender->length;
  while (sender->copies) {
    ssize_t bytes = write_copy(sender, wr);
    if (bytes < 0 && errno == EINTR) continue;
    bool full = bytes < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS);
    if (bytes < 0 && !full) {
      try_again(sender, soft_clock_ns());
      break;
    }
    if (!full) sender->written += (uint64_t)bytes;
    if (sender->written < whole) {
      sender->writable = false;
      return false;
    }
    sender->written = 0;
    sender->copies--;
    soft_context(qp->verbs.context)->counters.bytes_sent += sender->length;
  }
  sender->begun = false;
  return true;
}
