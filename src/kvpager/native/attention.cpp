#include "vec.h"
