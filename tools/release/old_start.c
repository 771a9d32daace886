// The start of a program that was compiled with glibc 2.36 and runs on 2.28: a member of the
// archive of its own, which no shared library takes. Start-up code of glibc 2.34 and later leaves
// the constructors of a program to the C library; before, the program named a function that ran
// them.
#include <stddef.h>

typedef void (*Initialiser)(int, char**, char**);
typedef int (*Main)(int, char**, char**);
extern Initialiser __init_array_start[];
extern Initialiser __init_array_end[];
void _init(void);

static void run_initialisers(int count, char** arguments, char** environment) {
  _init();
  for (Initialiser* each = __init_array_start; each != __init_array_end; ++each)
    (*each)(count, arguments, environment);
}

int start_of_glibc(Main main, int count, char** arguments, Initialiser initialise,
                   void (*finish)(void), void (*finish_loader)(void), void* stack_end);
__asm__(".symver start_of_glibc, __libc_start_main@GLIBC_2.2.5");

int __libc_start_main(Main main, int count, char** arguments, Initialiser initialise,
                      void (*finish)(void), void (*finish_loader)(void), void* stack_end) {
  return start_of_glibc(main, count, arguments, initialise != NULL ? initialise : run_initialisers,
                        finish, finish_loader, stack_end);
}
