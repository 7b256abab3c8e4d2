// Preloaded, makes the MKL inside PyTorch choose its kernels as on the CPU of another vendor than Intel.
//
// MKL asks these two functions whose CPU it is on, and does so through the symbol table, where a preload comes first.

static int times_asked = 0;

/// How often MKL has asked: 0 means that the preload is without effect.
int smp_other_cpu_times_asked(void) { return times_asked; }

int mkl_serv_intel_cpu(void) {
  ++times_asked;
  return 0;
}

int mkl_serv_intel_cpu_true(void) {
  ++times_asked;
  return 0;
}
