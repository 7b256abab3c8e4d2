#pragma once

#include <smp/transport.h>

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "socket.h"

namespace smp::tcp {

/// One connected, non-blocking socket for each other rank, none at [rank]. Collective and blocking.
///
/// Each rank listens on a free port of all its addresses, `exchange` tells all ranks each other's, and the higher of
/// two ranks connects. Only who knows the secret that rank 0 made, and is a rank that is still missing, is accepted.
/// `check_interrupt` is called many times a second, and may throw.
/// Throws FailureError when a rank cannot be reached or does not come within `patience`; what `exchange` throws.
std::vector<Socket> connect_ranks(int rank, int size, const Exchange& exchange, std::chrono::milliseconds patience,
                                  const std::function<void()>& check_interrupt);

}  // namespace smp::tcp
