/* See soft_stream.h. The number of a message travels as its immediate data, as credits do. */
#define _POSIX_C_SOURCE 200809L
#include "soft_stream.h"

#include "../verbs/wc_status.h"
#include "check.h"

#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define WINDOW 16 /* messages in flight; with the credits they never meet an empty receive queue */
#define CREDIT_EVERY 8
#define RECEIVES 24
#define SLOT_BYTES 8192
#define MAX_BYTES 6000
#define SOURCE_BYTES 16384 /* of pattern, at the start of the memory; the slots lie behind */
#define IS_CREDIT (UINT32_C(1) << 31)
#define STALL_SECONDS 60

struct stream {
  struct side *side;
  uint32_t messages;
  uint32_t sent, acknowledged, received, credited;
  uint32_t sends_queued;
  uint64_t bytes;
  const char *source;
};

/* Sizes and places by sequence number: both sides know what comes. */
static uint32_t size_of(uint32_t sequence) {
  uint32_t mixed = sequence * UINT32_C(2654435761);
  return sequence % 5 == 0 ? mixed >> 26 : (mixed >> 8) % (MAX_BYTES + 1);
}

static uint32_t place_of(uint32_t sequence) { return sequence * 7 % (SOURCE_BYTES - MAX_BYTES); }

static void post_slot(struct side *side, uint64_t slot) {
  CHECK_EQUAL(side_receive(side, slot, SOURCE_BYTES + slot * SLOT_BYTES, SLOT_BYTES), 0);
}

void stream_prepare(struct side *side) {
  side_fill(side->memory, SOURCE_BYTES, 9);
  for (uint64_t slot = 0; slot < RECEIVES; slot++) post_slot(side, slot);
}

static void send_message(struct stream *stream, uint32_t imm_data, uint32_t place, uint32_t length) {
  struct side *side = stream->side;
  struct ibv_sge sge = {(uintptr_t)stream->source + place, length, side->mr->lkey};
  struct ibv_send_wr wr = {.sg_list = &sge,
                           .num_sge = 1,
                           .opcode = IBV_WR_SEND_WITH_IMM,
                           .imm_data = imm_data,
                           .send_flags = IBV_SEND_SIGNALED},
                     *bad;
  CHECK_EQUAL(ibv_post_send(side->qp, &wr, &bad), 0);
  stream->sends_queued++;
  stream->bytes += length;
}

static void take_message(struct stream *stream, const struct ibv_wc *wc) {
  CHECK_EQUAL(wc->wc_flags, IBV_WC_WITH_IMM);
  if (wc->imm_data & IS_CREDIT) {
    stream->acknowledged = wc->imm_data & ~IS_CREDIT;
  } else {
    uint32_t sequence = stream->received++;
    CHECK_EQUAL(wc->imm_data, sequence);
    CHECK_EQUAL(wc->byte_len, size_of(sequence));
    const char *data = stream->side->memory + SOURCE_BYTES + wc->wr_id * SLOT_BYTES;
    CHECK(memcmp(data, stream->source + place_of(sequence), wc->byte_len) == 0, "message %u is corrupt", sequence);
  }
  post_slot(stream->side, wc->wr_id);
}

static int poll(struct stream *stream) {
  struct ibv_wc wc[8];
  int count = ibv_poll_cq(stream->side->cq, 8, wc);
  CHECK(count >= 0);
  for (int i = 0; i < count; i++) {
    CHECK(wc[i].status == IBV_WC_SUCCESS, "%s", verbs_wc_status_name(wc[i].status));
    if (wc[i].opcode & IBV_WC_RECV)
      take_message(stream, &wc[i]);
    else
      stream->sends_queued--;
  }
  return count;
}

static int send_next(struct stream *stream) {
  if (stream->sends_queued >= 30) return 0;
  if (stream->received >= stream->credited + CREDIT_EVERY) {
    stream->credited += CREDIT_EVERY;
    send_message(stream, IS_CREDIT | stream->credited, 0, 0);
    return 1;
  }
  if (stream->sent == stream->messages || stream->sent - stream->acknowledged >= WINDOW) return 0;
  send_message(stream, stream->sent, place_of(stream->sent), size_of(stream->sent));
  stream->sent++;
  return 1;
}

void stream_run(struct side *side, uint32_t messages) {
  struct stream stream = {.side = side, .messages = messages, .source = side->memory};
  struct verbs_counters before = side_counters(side);
  time_t progress = time(NULL);
  while (stream.acknowledged < messages || stream.credited < messages || stream.sends_queued) {
    if (poll(&stream) + send_next(&stream)) {
      progress = time(NULL);
    } else {
      CHECK(time(NULL) - progress < STALL_SECONDS, "stalled: %u sent, %u acknowledged, %u received", stream.sent,
            stream.acknowledged, stream.received);
      sched_yield();
    }
  }
  struct verbs_counters after = side_counters(side);
  CHECK_EQUAL(after.dropped, before.dropped);
  CHECK_EQUAL(after.bytes_sent - before.bytes_sent, stream.bytes);
  CHECK_EQUAL(after.sends - before.sends, messages + messages / CREDIT_EVERY);
  CHECK_EQUAL(after.receives - before.receives, messages + messages / CREDIT_EVERY);
}

uint32_t stream_messages(uint32_t otherwise) {
  const char *text = getenv("MESSAGES");
  return text ? (uint32_t)atoi(text) / 16 * 8 : otherwise;
}

struct side_address stream_exchange(int fd, const struct side *side) {
  struct side_address own = side_address(side), peer;
  CHECK_EQUAL(write(fd, &own, sizeof own), sizeof own);
  CHECK_EQUAL(read(fd, &peer, sizeof peer), sizeof peer);
  return peer;
}

void stream_in_two_processes(void (*run_side)(int fd)) {
  int fds[2];
  CHECK_EQUAL(socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
  pid_t child = fork();
  if (child == 0) {
    close(fds[0]);
    run_side(fds[1]);
    exit(0);
  }
  close(fds[1]);
  run_side(fds[0]);
  CHECK_EQUAL(check_wait(child), 0);
}

struct end {
  void (*run_side)(int fd);
  int fd;
};

static void *run_end(void *end) {
  ((struct end *)end)->run_side(((struct end *)end)->fd);
  return NULL;
}

void stream_in_two_threads(void (*run_side)(int fd)) {
  int fds[2];
  CHECK_EQUAL(socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
  pthread_t thread;
  struct end other = {run_side, fds[1]};
  CHECK_EQUAL(pthread_create(&thread, NULL, run_end, &other), 0);
  run_side(fds[0]);
  CHECK_EQUAL(pthread_join(thread, NULL), 0);
}
