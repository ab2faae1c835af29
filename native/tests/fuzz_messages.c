/*
 * Fuzzes what a rank does with messages: whatever bytes a peer sends, they end in data of the right size or in an
 * error.
 *
 * Two real engines meet over the soft provider. Rank 0 has operations in progress; rank 1 posts messages whose bytes
 * are the input. An input is a list of records: what to fix (a mask), channel and payload length (one byte), the 64
 * bytes of the header, and of what stands behind it where the header says that there is something. Without that nearly
 * every input would end at the first check.
 */
#include "operation.h"
#include "pair.h"
#include "timers.h"

enum fix {
  MAGIC = 1,
  SEQUENCE = 2, /* the one that is due */
  ACKS = 4,     /* confirms all that rank 0 has sent, and has room for more */
  LENGTH = 8,
  TRANSFER = 16, /* of an operation in progress */
  DESCRIPTOR = 32,
  DATA = 64,  /* the kind */
  LATER = 128 /* some time passes before rank 0 looks */
};

struct input {
  const uint8_t *bytes;
  size_t left;
};

static void take(struct input *input, void *to, size_t bytes) {
  size_t taken = bytes < input->left ? bytes : input->left;
  memset(to, 0, bytes);
  if (taken) memcpy(to, input->bytes, taken);
  input->bytes += taken;
  input->left -= taken;
}

static uint8_t take_byte(struct input *input) {
  uint8_t byte;
  take(input, &byte, sizeof byte);
  return byte;
}

static mlxdist_layout vector(int32_t dtype, int64_t count) {
  return (mlxdist_layout){.dtype = dtype, .ndim = 1, .shape = {count}};
}

#define LARGE 5000 /* int32: three messages */

/* What rank 0 is doing, and the memory of it. */
struct work {
  mlxdist_call calls[5];
  float sum[10], gathered[20];
  int32_t received[LARGE], reduced[LARGE], sent[LARGE];
};

static void begin(struct work *work, mlxdist_group *group, uint8_t which) {
  mlxdist_layout small = vector(MLXDIST_FLOAT32, 10), large = vector(MLXDIST_INT32, LARGE);
  for (int i = 0; i < 5; i++) work->calls[i] = (mlxdist_call){.timeout = -1, .starts = 1};
  if (which & 1) mlxdist_all_reduce(group, work->sum, work->sum, &small, MLXDIST_SUM, &work->calls[0]);
  if (which & 2) mlxdist_recv(group, work->received, &large, 1, &work->calls[1]);
  if (which & 4) mlxdist_all_reduce(group, work->sent, work->reduced, &large, MLXDIST_MAX, &work->calls[2]);
  if (which & 8) mlxdist_all_gather(group, work->sum, work->gathered, &small, &work->calls[3]);
  if (which & 16) mlxdist_barrier(group, &work->calls[4]);
}

static void end(struct work *work, mlxdist_group *group) {
  struct engine *engine = group->engine;
  mlxdist_group_abort(group, MLXDIST_ABORTED, "the input is over");
  bool progressed = false;
  engine_lock(engine);
  engine_progress(engine, &progressed);
  engine_unlock(engine);
  for (int i = 0; i < 5; i++) {
    if (!work->calls[i].handle) continue;
    REQUIRE(mlxdist_handle_done(work->calls[i].handle));
    if (mlxdist_handle_wait(work->calls[i].handle, -1)) REQUIRE(mlxdist_last_error()[0]);
    mlxdist_handle_free(work->calls[i].handle);
  }
}

static const struct transfer *posted(const struct peer *peer) { return peer->posted; }

/* A header, and what stands behind it where there are more links. */
struct head {
  struct wire_header header;
  struct wire_links links;
};

static void fix(uint8_t what, const struct channel *to, struct head *head, uint32_t payload) {
  struct wire_header *header = &head->header;
  const struct peer *peer = peer_of(to->endpoint);
  if (what & MAGIC) header->magic = WIRE_MAGIC;
  if (what & SEQUENCE) header->sequence = to->received + 1;
  if (what & DATA) header->kind = WIRE_DATA;
  if (what & LENGTH) header->length = payload;
  if (what & TRANSFER && posted(peer)) {
    header->group = posted(peer)->operation->group->id;
    header->place = posted(peer)->place;
    header->index = posted(peer)->index;
    header->offset = posted(peer)->done;
  }
  for (uint32_t i = 0; what & ACKS && i < peer->endpoint.channel_count; i++) {
    struct wire_acks *acks = i < 2 ? &header->acks : &head->links.acks[i / 2 - 1];
    acks->ack[i % 2] = peer->endpoint.channels[i].sent;
    acks->credits[i % 2] = (uint16_t)(peer->endpoint.channels[i].slots / 2);
  }
}

/* Posts one message from rank 1, as its own engine never would. */
static void send_record(struct pair *pair, struct input *input, uint8_t what) {
  struct peer *from = &pair->group[1]->engine->peers[0], *at = &pair->group[0]->engine->peers[1];
  uint8_t size = take_byte(input);
  uint32_t index = size % from->endpoint.channel_count;
  struct channel *channel = &from->endpoint.channels[index];
  /* Full messages are what most operations wait for. */
  uint32_t most = channel->slot_bytes - CHANNEL_OVERHEAD, payload = most * (size >> 2) / 63;
  if (what & TRANSFER && posted(at)) {
    uint64_t left = posted(at)->bytes - posted(at)->done;
    if (left < payload) payload = (uint32_t)left;
  }
  char *bytes = channel->send_slots;
  struct head head = {0};
  take(input, &head.header, sizeof head.header);
  bool links = head.header.flags & WIRE_LINKS;
  if (links) take(input, &head.links, sizeof head.links);
  fix(what, &at->endpoint.channels[index], &head, payload);
  memcpy(bytes, &head, sizeof head);
  uint32_t before = links ? sizeof head : sizeof head.header;
  if (head.header.flags & WIRE_FIRST) {
    struct wire_descriptor descriptor;
    take(input, &descriptor, sizeof descriptor);
    if (what & DESCRIPTOR && posted(at)) {
      descriptor = posted(at)->operation->receives;
      descriptor.bytes = posted(at)->bytes;
    }
    memcpy(bytes + before, &descriptor, sizeof descriptor);
    before += sizeof descriptor;
  }
  struct ibv_sge sge = {.addr = (uintptr_t)bytes, .length = before + payload, .lkey = channel->lkey};
  struct ibv_send_wr request = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED};
  struct ibv_send_wr *bad;
  (void)ibv_post_send(channel->qp, &request, &bad);
  struct ibv_wc completions[16];
  while (ibv_poll_cq(channel->device->cq, 16, completions) > 0) continue;
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
  static struct work work;
  struct input input = {bytes, size};
  uint8_t start = take_byte(&input), which = take_byte(&input);
  mlxdist_options options;
  mlxdist_default_options(&options);
  options.links_per_peer = 1 + (start & 1) + (start >> 5 & 2);
  options.bulk_slot_bytes = 8192; /* small ones, since they are made for every input */
  options.bulk_slots = 2 + (start >> 1 & 3);
  options.eager_slots = 4 + (start >> 3 & 7);
  struct pair pair;
  pair_open(&pair, &options);
  struct engine *engine = pair.group[0]->engine;
  begin(&work, pair.group[0], which);
  uint64_t now = clock_ns();
  while (input.left) {
    uint8_t what = take_byte(&input);
    send_record(&pair, &input, what);
    pair_turn(&pair, 0);
    if (!(what & LATER)) continue;
    now += 30000000;
    engine_lock(engine);
    engine_check_timers(engine, now);
    engine_unlock(engine);
  }
  end(&work, pair.group[0]);
  pair_close(&pair);
  return 0;
}
