"""Several processes that train one model: those of a machine share its host memory."""
