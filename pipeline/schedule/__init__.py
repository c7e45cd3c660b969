"""Every night by itself: the CronJob that starts a launcher, with the account and the rights it needs."""
