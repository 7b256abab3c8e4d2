// The only source with fmt's engine in it.
#define FMT_HEADER_ONLY 1
#include <fmt/format.h>

#include "smp/format.h"

namespace smp {

std::string vformatted(fmt::string_view format, fmt::format_args arguments) { return fmt::vformat(format, arguments); }

}  // namespace smp
