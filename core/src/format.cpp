// The only source with fmt's engine in it: CMake defines FMT_HEADER_ONLY for it alone.
#include "smp/format.h"

#include <fmt/format.h>

namespace smp {

std::string vformatted(fmt::string_view format, fmt::format_args arguments) { return fmt::vformat(format, arguments); }

}  // namespace smp
