#include "straggler.h"

#include "operation.h"

/* It waits here for those of other members, with which it will be reduced. */
static bool has_next_piece(const struct transfer *transfer) {
  return transfer->arrived && recv_header(transfer->arrived)->offset == transfer->done;
}

static const struct transfer *waited_transfer(const struct operation *operation, bool *receives) {
  if (operation->current >= operation->round_count) return 0;
  const struct round *round = &operation->rounds[operation->current];
  *receives = true;
  for (int i = 0; i < round->ins; i++) {
    const struct transfer *transfer = &operation->in.list[round->first_in + i];
    if (!transfer_is_done(transfer) && !has_next_piece(transfer)) return transfer;
  }
  *receives = false;
  for (int i = 0; i < round->outs; i++) {
    const struct transfer *transfer = &operation->out.list[round->first_out + i];
    if (!transfer_is_sent(transfer)) return transfer;
  }
  return 0;
}

/* What waits for a slot, or for an acknowledgement, does without the peer's program. */
static bool needs_entry(const struct transfer *transfer, bool receives) {
  if (receives) return true;
  return transfer->done < transfer->bytes &&
         transfer->done >= transfer_eager_limit(transfer->operation->group->engine) && !transfer_is_cleared(transfer);
}

struct straggler operation_straggler(const struct operation *operation) {
  bool receives = false;
  const struct transfer *transfer = waited_transfer(operation, &receives);
  if (!transfer) return (struct straggler){.rank = -1, .entered = true};
  return (struct straggler){.rank = transfer->group_peer->peer->endpoint.rank,
                            .entered = operation_has_entered(operation, transfer->group_peer),
                            .receives = receives,
                            .needs_entry = needs_entry(transfer, receives),
                            .transfer = transfer_name(transfer)};
}
