// Random numbers: a sim generator is a CPU generator under another device's name.
#pragma once

#include <ATen/core/Generator.h>

namespace simdev {

// Shared with the CPU's default generator: torch.manual_seed gives the same numbers on both.
const at::Generator& default_generator(int device);
at::Generator new_generator(int device);

// The CPU generator that a CPU kernel has to be given in place of a sim generator.
at::Generator cpu_generator_of(const at::Generator& generator);

}  // namespace simdev
