/* Loads libibverbs by each name given, as plug-ins do, and prints how many devices it lists. Their own functions are
 * called, whichever library that is, and the program goes on with the next. */
#include <dlfcn.h>
#include <stdio.h>

int main(int argc, char **argv)
{
	for (int at = 1; at < argc; at++) {
		void *library = dlopen(argv[at], RTLD_NOW | RTLD_LOCAL);
		if (!library) {
			fprintf(stderr, "%s\n", dlerror());
			return 2;
		}
		void **(*list)(int *) = (void **(*)(int *))dlsym(library, "ibv_get_device_list");
		void (*release)(void **) = (void (*)(void **))dlsym(library, "ibv_free_device_list");
		int count = -1;
		void **found = list(&count);
		printf("%d\n", count);
		fflush(stdout);
		if (found)
			release(found);
	}
	return 0;
}
