#pragma once

#include <smp/transport.h>

#include <memory>

/// What libsmp finds by name in libsmp_mpi. Does and throws what smp::make_mpi_transport() does.
extern "C" void smp_make_mpi_transport(std::shared_ptr<smp::Transport>& transport);
