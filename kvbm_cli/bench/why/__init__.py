"""Why kvbm did not make a cell faster: causes that the numbers of its runs show. Pure."""
